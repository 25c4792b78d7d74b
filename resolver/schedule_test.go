package resolver_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

// A running resolver's verdict turns at the second that a schedule, a pause or an unblocking says, though what it is
// asked has been in its caches since before. Each bubble begins at midnight UTC, on Saturday, 1 January 2000.
func TestVerdictsTurnAtTheSecond(t *testing.T) {
	begin := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	day := func(from, to time.Duration) *userv1.Window {
		return &userv1.Window{Days: 0x7f, From: uint32(from / time.Minute), To: uint32(to / time.Minute)}
	}
	schedule := func(zone string, action userv1.ScheduleAction, windows ...*userv1.Window) *userv1.Settings {
		return &userv1.Settings{Lists: strs("l"), Schedules: &userv1.ScheduleSet{Values: []*userv1.Schedule{{Id: "s", TimeZone: zone, Action: action, Everything: true, Windows: windows}}}}
	}
	const block, pause = userv1.ScheduleAction_SCHEDULE_ACTION_BLOCK, userv1.ScheduleAction_SCHEDULE_ACTION_PAUSE
	const h, m, s = time.Hour, time.Minute, time.Second
	for _, c := range []struct {
		what     string
		settings *userv1.Settings
		name     string
		blocked  bool            // at first
		turns    []time.Duration // after the beginning
	}{
		{"several a day", schedule("", block, day(10*m, 12*m), day(13*m, 14*m)), "plain", false, []time.Duration{10 * m, 12 * m, 13 * m, 14 * m}},
		{"one behind the other", schedule("", block, day(10*m, 12*m), day(12*m, 14*m)), "plain", false, []time.Duration{10 * m, 14 * m}},
		{"from the evening before", schedule("", block, day(22*h, 24*h+3*m)), "plain", true, []time.Duration{3 * m}},
		{"a quarter to", schedule("Asia/Kathmandu", block, day(5*h+48*m, 5*h+50*m)), "plain", false, []time.Duration{3 * m, 5 * m}},
		{"fourteen hours ahead", schedule("Pacific/Kiritimati", pause, day(14*h+4*m, 14*h+6*m)), "ads", true, []time.Duration{4 * m, 6 * m}},
		{"a pause that ends", &userv1.Settings{Lists: strs("l"), PausedUntil: proto.Int64(begin.Add(2*m + 17*s).Unix())}, "ads", false, []time.Duration{2*m + 17*s}},
		{"an unblocking that ends", &userv1.Settings{Lists: strs("l"), Unblocks: &userv1.UnblockSet{Values: []*userv1.Unblock{{Name: "ads.example", Until: begin.Add(m + 41*s).Unix()}}}},
			"ads", false, []time.Duration{m + 41*s}},
	} {
		synctest.Test(t, func(t *testing.T) {
			if !time.Now().Equal(begin) {
				t.Fatalf("it is %v", time.Now().UTC())
			}
			sim := newInternet(t, zones{zoneAt("example.", labServer, "ads A 192.0.2.1\nplain A 192.0.2.2\n")})
			l, text := list(0, "||ads.example^")
			withHousehold(t, sim, map[string]proto.Message{"list/l": l}, map[string]proto.Message{
				"who":  &userv1.User{Settings: c.settings, Devices: []*userv1.Device{{Id: "who", Links: []string{"10.0.1.1"}}}},
				"else": &userv1.User{Devices: []*userv1.Device{{Id: "else", Links: []string{"10.0.1.2"}}}},
			}, [][]byte{text}, nil, func(h *household) {
				h.from("10.0.1.2", c.name+".example.", dns.TypeA) // it is in the caches
				is := func(blocked bool, when string) {
					t.Helper()
					r, err := h.from("10.0.1.1", c.name+".example.", dns.TypeA)
					if err != nil || (extended(r) == 17) != blocked {
						t.Errorf("%s, %s %v after midnight: %s, want it blocked: %v", c.what, when, time.Since(begin), briefly(r, err), blocked)
					}
				}
				now := c.blocked
				is(now, "at first")
				for _, turn := range c.turns {
					time.Sleep(time.Until(begin.Add(turn - 10*time.Millisecond)))
					is(now, "before")
					time.Sleep(time.Until(begin.Add(turn)))
					now = !now
					is(now, "from then on")
					time.Sleep(30 * time.Second)
					is(now, "still")
				}
			})
		})
	}
}
