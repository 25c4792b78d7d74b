package bizlogic

import (
	"fmt"
	"log/slog"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

// keyAccepted is the record by which an accepted shrink reaches the fleet.
const keyAccepted = "guard/accepted"

// acceptFor is how long after an accept further shrinking passes, so that what was refused can be repeated.
const acceptFor = 15 * time.Minute

// Guard is a shrink guard: what a dataset holds may not fall below its maximum within Window by more than
// Share and more than Min.
type Guard struct {
	Share  float64       // fraction of 1; 0 means 0.1
	Min    int           // objects; 0 means 20
	Window time.Duration // 0 means 24 h
}

func (g Guard) withDefaults() Guard {
	if g.Share <= 0 {
		g.Share = 0.1
	}
	if g.Min <= 0 {
		g.Min = 20
	}
	if g.Window <= 0 {
		g.Window = 24 * time.Hour
	}
	return g
}

// trips reports whether falling from most to now is too much.
func (g Guard) trips(most, now, atLeast uint64) bool {
	if now >= most {
		return false
	}
	lost := most - now
	return lost > atLeast && float64(lost) > g.Share*float64(most)
}

// objects says why going from totals `from` to totals `to` is not wanted; "" if it is.
func (g Guard) objects(mem *storev1.Guard, from, to *userv1.Totals, now time.Time) string {
	most := g.maximum(mem, from, now)
	for _, t := range []struct {
		what           string
		most, from, to uint64
		atLeast        uint64
	}{
		{"users", most.Users, from.Users, to.Users, uint64(g.Min)},
		{"enabled users", most.EnabledUsers, from.EnabledUsers, to.EnabledUsers, uint64(g.Min)},
		{"devices", most.Devices, from.Devices, to.Devices, uint64(g.Min)},
		// A record is about 200 bytes; below Min records' worth, bytes say nothing that counts do not.
		{"bytes of records", most.RecordBytes, from.RecordBytes, to.RecordBytes, uint64(g.Min) * 1024},
	} {
		if t.to < t.from && g.trips(t.most, t.to, t.atLeast) {
			return fmt.Sprintf("%s would fall from %d (most in %v) to %d", t.what, t.most, g.Window, t.to)
		}
	}
	return ""
}

// A heldBack is the error of a text that the guard holds.
type heldBack struct {
	list   string // id or URL
	most   uint32 // rules within the window
	window time.Duration
	rules  int  // of the text that is held
	news   bool // nothing of the list was held before
}

func (h *heldBack) Error() string {
	return fmt.Sprintf("list %s: the shrink guard holds: its rules would fall from %d (most in %v) to %d; `sluicectl list accept %s` takes the new text",
		h.list, h.most, h.window, h.rules, h.list)
}

// GRPCStatus makes it FAILED_PRECONDITION.
func (h *heldBack) GRPCStatus() *status.Status {
	return status.New(codes.FailedPrecondition, h.Error())
}

// log says it when it begins.
func (h *heldBack) log(log *slog.Logger) {
	if h.news {
		log.Warn("the shrink guard holds a list's new text; the old one stays", "list", h.list, "rules", h.rules, "most", h.most, "within", h.window,
			"if_it_is_meant", "sluicectl list accept "+h.list)
	}
}

// maximum is the largest of each total within the window, and at least cur.
func (g Guard) maximum(mem *storev1.Guard, cur *userv1.Totals, now time.Time) *userv1.Totals {
	most := proto.CloneOf(cur)
	for _, h := range mem.GetHours() {
		if time.Unix(h.Hour, 0).Add(time.Hour + g.Window).After(now) {
			raiseTotals(most, h.Max)
		}
	}
	return most
}

// observe returns the guard's memory after totals have become t. An accepted shrink makes it forget.
func (g Guard) observe(mem *storev1.Guard, t *userv1.Totals, now time.Time, accepted bool) *storev1.Guard {
	out := &storev1.Guard{AcceptedThrough: mem.GetAcceptedThrough()}
	hour := now.Truncate(time.Hour).Unix()
	if !accepted {
		for _, h := range mem.GetHours() {
			if time.Unix(h.Hour, 0).Add(time.Hour + g.Window).After(now) {
				out.Hours = append(out.Hours, h)
			}
		}
	}
	if n := len(out.Hours); n > 0 && out.Hours[n-1].Hour == hour {
		last := &storev1.GuardHour{Hour: hour, Max: proto.CloneOf(out.Hours[n-1].Max)}
		raiseTotals(last.Max, t)
		out.Hours[n-1] = last
	} else {
		out.Hours = append(out.Hours, &storev1.GuardHour{Hour: hour, Max: proto.CloneOf(t)})
	}
	return out
}

func raiseTotals(most, t *userv1.Totals) {
	most.Users = max(most.Users, t.GetUsers())
	most.EnabledUsers = max(most.EnabledUsers, t.GetEnabledUsers())
	most.Devices = max(most.Devices, t.GetDevices())
	most.RecordBytes = max(most.RecordBytes, t.GetRecordBytes())
}

// addTotals adds a record to totals, or with sign -1 takes it away.
func addTotals(t *userv1.Totals, kind, key string, bytes []byte, sign int) {
	add := func(n *uint64, by int) { *n += uint64(int64(sign * by)) } // wraps back when taken away
	if strings.HasPrefix(key, "guard/") {
		return
	}
	add(&t.Users, 1)
	add(&t.RecordBytes, len(bytes))
	if kind != Users {
		return
	}
	u := new(userv1.User)
	if proto.Unmarshal(bytes, u) != nil {
		return
	}
	add(&t.Devices, len(u.Devices))
	if !u.Disabled && (u.Settings == nil || u.Settings.Enabled == nil || *u.Settings.Enabled) {
		add(&t.EnabledUsers, 1)
	}
}

// byImport marks an acceptance that came with one import, or the accepted text of a list, and opens nothing else.
const byImport = "import"

// An acceptance is the newest accepted shrink of a dataset, if there was any.
type acceptance struct{ *userv1.ShrinkAccepted }

func acceptedShrink(tx *bolt.Tx, kind string) acceptance {
	_, b, ok, err := getRecord(tx, kind, []byte(keyAccepted))
	if err != nil || !ok {
		return acceptance{}
	}
	a := new(userv1.ShrinkAccepted)
	if proto.Unmarshal(b, a) != nil {
		return acceptance{}
	}
	return acceptance{a}
}

// open reports whether what an operator accepted may still be repeated. An acceptance that lies ahead was
// given by a clock that has been set back since: it is over, or it would leave the guard off until then.
func (a acceptance) open(now time.Time) bool {
	if a.ShrinkAccepted == nil || a.By == byImport {
		return false
	}
	age := now.Sub(time.Unix(a.Accepted, 0))
	return age > -time.Minute && age < acceptFor
}
