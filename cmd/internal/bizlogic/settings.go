package bizlogic

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
	_ "time/tzdata" // schedules name time zones, and a container may have no files of them

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver"
)

const (
	maxSet       = 512  // members of one set
	maxRewrites  = 1000 // rewrites of one layer
	maxRecords   = 32   // records of one rewrite
	maxWindows   = 32   // windows of one schedule
	maxSchedules = 32
)

// assign makes one KEY=V, KEY+=V or KEY-=V. The keys are the fields of user.v1 Settings, and a few fields
// of the records themselves.
func (v *view) assign(o *owner, as *adminv1.Assignment) error {
	key, value := as.GetKey(), strings.TrimSpace(as.GetValue())
	switch as.GetOperation() {
	case adminv1.Operation_OPERATION_SET, adminv1.Operation_OPERATION_ADD, adminv1.Operation_OPERATION_REMOVE:
	default:
		return invalid("operation", "of %q is none of =, += and -=", key)
	}
	if done, err := assignRecord(o, as, value); done || err != nil {
		return err
	}
	if *o.settings == nil {
		*o.settings = new(userv1.Settings)
	}
	m := (*o.settings).ProtoReflect()
	field := m.Descriptor().Fields().ByName(protoreflect.Name(key))
	if field == nil {
		return invalid("key", "there is no setting %q; there are %s", key, strings.Join(settingKeys(o), ", "))
	}
	if field.Kind() == protoreflect.MessageKind {
		return v.assignSet(o, field, as, value)
	}
	if as.GetOperation() != adminv1.Operation_OPERATION_SET {
		return invalid(key, "is not a set; only %s=VALUE works", key)
	}
	if value == "" {
		m.Clear(field)
		return nil
	}
	x, err := v.scalar(key, value, field)
	if err != nil {
		return err
	}
	m.Set(field, x)
	return nil
}

// settingKeys is what may be assigned.
func settingKeys(o *owner) []string {
	keys := []string{"name", "tenant"}
	if o.user != nil && o.device == "" {
		keys = append(keys, "policy", "disabled", "auto_devices", "max_devices")
	}
	fields := new(userv1.Settings).ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		keys = append(keys, string(fields.Get(i).Name()))
	}
	slices.Sort(keys)
	return keys
}

// assignRecord handles the keys that are fields of a record and not of its settings.
func assignRecord(o *owner, as *adminv1.Assignment, value string) (done bool, err error) {
	key := as.GetKey()
	switch key {
	case "name", "tenant", "policy", "disabled", "auto_devices", "max_devices":
	default:
		return false, nil
	}
	if as.GetOperation() != adminv1.Operation_OPERATION_SET {
		return true, invalid(key, "is not a set; only %s=VALUE works", key)
	}
	switch {
	case key == "name" && o.shared != nil:
		o.shared.Name = value
	case key == "tenant" && o.shared != nil:
		o.shared.Tenant = value
	case key == "name" && o.device != "":
		o.user.Devices[deviceIndex(o.user, o.device)].Name = value
	case o.user == nil || o.device != "":
		return true, invalid(key, "belongs to users")
	case key == "name":
		o.user.Name = value
	case key == "tenant":
		o.user.Tenant = value
	case key == "policy":
		o.user.Policy = value
	case key == "disabled":
		o.user.Disabled, err = parseBool(key, value)
	case key == "auto_devices":
		o.user.AutoDevices, err = parseBool(key, value)
	case key == "max_devices":
		var n uint64
		if n, err = strconv.ParseUint(value, 10, 32); err != nil || n > maxDevices {
			return true, invalid(key, "%q is not a number up to %d", value, maxDevices)
		}
		o.user.MaxDevices = uint32(n)
	}
	return true, err
}

func parseBool(key, value string) (bool, error) {
	switch value {
	case "true", "yes", "on":
		return true, nil
	case "false", "no", "off", "":
		return false, nil
	}
	return false, invalid(key, "%q is neither true nor false", value)
}

// scalar reads the value of a field that is no set.
func (v *view) scalar(key, value string, field protoreflect.FieldDescriptor) (protoreflect.Value, error) {
	none := protoreflect.Value{}
	switch field.Kind() {
	case protoreflect.BoolKind:
		b, err := parseBool(key, value)
		return protoreflect.ValueOfBool(b), err
	case protoreflect.EnumKind:
		n, err := parseEnum(key, value, field.Enum())
		return protoreflect.ValueOfEnum(n), err
	case protoreflect.Uint32Kind:
		n, err := parseNumber(key, value)
		return protoreflect.ValueOfUint32(n), err
	case protoreflect.Int64Kind: // paused_until, the only one; 0 ends a pause
		t, err := parseInstant(key, value, v.now)
		if err == nil && t != 0 && t <= v.now.Unix() {
			err = invalid(key, "%q is over already; a pause is ended by paused_until=0", value)
		}
		return protoreflect.ValueOfInt64(t), err
	case protoreflect.StringKind: // block_ipv4, block_ipv6
		a, err := netip.ParseAddr(value)
		if err != nil || a.Zone() != "" || a.Is4() != (key == "block_ipv4") {
			return none, invalid(key, "%q is not such an address", value)
		}
		return protoreflect.ValueOfString(a.String()), nil
	}
	return none, invalid(key, "cannot be assigned")
}

// parseEnum reads the name of an enum value, in lower case and without the enum's prefix.
func parseEnum(key, value string, enum protoreflect.EnumDescriptor) (protoreflect.EnumNumber, error) {
	values := enum.Values()
	prefix := strings.TrimSuffix(string(values.ByNumber(0).Name()), "UNSPECIFIED")
	var known []string
	for i := range values.Len() {
		name := strings.ToLower(strings.TrimPrefix(string(values.Get(i).Name()), prefix))
		if name == "unspecified" {
			continue
		}
		if name == strings.ReplaceAll(strings.ToLower(value), "-", "_") {
			return values.Get(i).Number(), nil
		}
		known = append(known, name)
	}
	return 0, invalid(key, "%q is none of %s", value, strings.Join(known, ", "))
}

// numberLimits is the largest value of the numeric settings; those in seconds also take durations.
var numberLimits = map[string]struct {
	most    uint64
	seconds bool
}{
	"block_ttl":     {86400, true},
	"log_retention": {10 * 366 * 86400, true},
	"rate_limit":    {1_000_000, false},
	"rate_burst":    {10_000_000, false},
}

func parseNumber(key, value string) (uint32, error) {
	limit := numberLimits[key]
	n, err := strconv.ParseUint(value, 10, 32)
	if err != nil && limit.seconds {
		var d time.Duration
		if d, err = time.ParseDuration(value); err == nil && (d < 0 || d%time.Second != 0) {
			return 0, invalid(key, "%q is not a whole number of seconds", value)
		}
		n = uint64(d / time.Second)
	}
	if err != nil {
		return 0, invalid(key, "%q is not a number%s", value, map[bool]string{true: " of seconds, nor a duration such as 10s"}[limit.seconds])
	}
	if n > limit.most {
		return 0, invalid(key, "%s is more than %d", value, limit.most)
	}
	return uint32(n), nil
}

// parseInstant reads RFC 3339, Unix seconds, or a time from now such as +1h.
func parseInstant(key, value string, now time.Time) (int64, error) {
	if d, ok := strings.CutPrefix(value, "+"); ok {
		in, err := time.ParseDuration(d)
		if err != nil || in <= 0 {
			return 0, invalid(key, "%q is not a time from now such as +1h", value)
		}
		return now.Add(in).Unix(), nil
	}
	if n, err := strconv.ParseInt(value, 10, 64); err == nil && n >= 0 {
		return n, nil
	}
	if t, err := time.Parse(time.RFC3339, value); err == nil {
		return t.Unix(), nil
	}
	return 0, invalid(key, "%q is none of 2030-01-02T15:04:05Z, Unix seconds, +1h", value)
}

// A set is a field that adds to, takes from or replaces what lies beneath.
type set[V any] struct {
	key     string
	most    int
	replace *bool
	values  *[]V
	removed *[]string
	name    func(V) string // what tells members apart
	parse   func(string) (V, error)
	canon   func(string) (string, error) // brings a name to be removed into the form that is stored
}

// change makes one assignment. base says that nothing lies beneath.
func (s set[V]) change(op adminv1.Operation, texts []string, base bool) error {
	index := func(name string) int {
		return slices.IndexFunc(*s.values, func(v V) bool { return s.name(v) == name })
	}
	if op == adminv1.Operation_OPERATION_SET {
		*s.replace, *s.values, *s.removed = true, nil, nil
	}
	for _, text := range texts {
		if op == adminv1.Operation_OPERATION_REMOVE {
			name, err := s.canon(text)
			if err != nil {
				return err
			}
			if i := index(name); i >= 0 {
				*s.values = slices.Delete(*s.values, i, i+1)
			}
			if !base && !*s.replace && !slices.Contains(*s.removed, name) {
				*s.removed = append(*s.removed, name)
			}
			continue
		}
		member, err := s.parse(text)
		if err != nil {
			return err
		}
		name := s.name(member)
		*s.removed = slices.DeleteFunc(*s.removed, func(r string) bool { return r == name })
		if i := index(name); i >= 0 {
			(*s.values)[i] = member
		} else {
			*s.values = append(*s.values, member)
		}
	}
	if n := len(*s.values) + len(*s.removed); n > s.most {
		return invalid(s.key, "would have %d members; at most %d", n, s.most)
	}
	if base {
		*s.replace = false // nothing to replace; equal settings have equal bytes
	}
	return nil
}

// assignSet makes one assignment to a set. KEY= goes back to what lies beneath; KEY=- is the empty set.
func (v *view) assignSet(o *owner, field protoreflect.FieldDescriptor, as *adminv1.Assignment, value string) error {
	m := (*o.settings).ProtoReflect()
	key, op, base := as.GetKey(), as.GetOperation(), o.shared != nil
	if value == "" {
		if op != adminv1.Operation_OPERATION_SET {
			return invalid(key, "nothing to add or remove")
		}
		m.Clear(field)
		return nil
	}
	var texts []string
	switch {
	case value == "-" && op == adminv1.Operation_OPERATION_SET:
	case field.Message().Name() == "ScheduleSet" && op != adminv1.Operation_OPERATION_REMOVE:
		texts = []string{value} // commas have a meaning inside
	default:
		for text := range strings.SplitSeq(value, ",") {
			texts = append(texts, strings.TrimSpace(text))
		}
	}
	id := func(s string) (string, error) { return s, checkID(key, s) }
	name := func(s string) (string, error) {
		rest, star := strings.CutPrefix(s, "*.")
		n, err := canonicalName(key, rest)
		if star {
			n = "*." + n
		}
		return n, err
	}
	var err error
	switch x := m.Mutable(field).Message().Interface().(type) {
	case *userv1.StringSet:
		parse := func(s string) (string, error) { return v.member(key, s) }
		canon := parse
		if what := references[key]; what != "" {
			canon = func(s string) (string, error) {
				if slices.Contains(x.Values, s) || slices.Contains(x.Removed, s) {
					return s, nil // what is gone can be taken away
				}
				return parse(s)
			}
		}
		err = set[string]{key, maxSet, &x.Replace, &x.Values, &x.Removed, func(s string) string { return s }, parse, canon}.change(op, texts, base)
	case *userv1.OwnListSet:
		err = set[*userv1.OwnList]{key, maxSet, &x.Replace, &x.Values, &x.Removed, (*userv1.OwnList).GetId, v.parseOwnList, id}.change(op, texts, base)
	case *userv1.RewriteSet:
		err = set[*userv1.Rewrite]{key, maxRewrites, &x.Replace, &x.Values, &x.Removed, (*userv1.Rewrite).GetName, parseRewrite, name}.change(op, texts, base)
	case *userv1.UnblockSet:
		parse := func(s string) (*userv1.Unblock, error) { return parseUnblock(s, v.now) }
		canon := func(s string) (string, error) { n, err := name(s); return strings.TrimPrefix(n, "*."), err }
		err = set[*userv1.Unblock]{key, maxRewrites, &x.Replace, &x.Values, &x.Removed, (*userv1.Unblock).GetName, parse, canon}.change(op, texts, base)
		x.Values = slices.DeleteFunc(x.Values, func(u *userv1.Unblock) bool { return u.Until != 0 && u.Until <= v.now.Unix() })
	case *userv1.ScheduleSet:
		parse := func(s string) (*userv1.Schedule, error) { return v.parseSchedule(s) }
		err = set[*userv1.Schedule]{key, maxSchedules, &x.Replace, &x.Values, &x.Removed, (*userv1.Schedule).GetId, parse, id}.change(op, texts, base)
	default:
		err = invalid(key, "cannot be assigned")
	}
	if err == nil && proto.Size(m.Get(field).Message().Interface()) == 0 {
		m.Clear(field)
	}
	return err
}

// references says which settings hold ids of catalogue records, and of what kind.
var references = map[string]string{"lists": "list", "services": "service", "categories": "category", "safe_search": "safesearch"}

// member checks one string of a StringSet.
func (v *view) member(key, s string) (string, error) {
	if what := references[key]; what != "" {
		if err := checkID(key, s); err != nil {
			return "", err
		}
		return s, v.refer(key, what, s)
	}
	switch key {
	case "allow_networks", "deny_networks":
		return canonicalNetwork(key, s)
	case "allow_domains", "deny_domains", "rebinding_exceptions":
		// Each stands for all names under it too, so that a star says nothing more.
		return canonicalName(key, strings.TrimPrefix(s, "*."))
	case "block_types":
		t, err := resolver.CheckType(s)
		if err != nil {
			return "", invalid(key, "%q is neither the mnemonic of an RR type nor TYPE and a number", s)
		}
		return t, nil
	}
	return "", invalid(key, "cannot be assigned")
}

// refer checks that the catalogue has something.
func (v *view) refer(field, what, id string) error {
	_, _, ok, err := v.get(Catalogue, what+"/"+id)
	if err != nil || ok {
		return err
	}
	var known []string
	err = eachOf(v.tx, what+"/", func(id string, _ uint64, _ []byte) error {
		known = append(known, id)
		return nil
	})
	if err != nil {
		return err
	}
	const few = 8
	all := "sluicectl " + what + " list"
	switch like := nearest(id, known, 5); {
	case len(known) == 0:
		return invalid(field, "there is no %s %q, nor any other", what, id)
	case len(known) <= few:
		return invalid(field, "there is no %s %q; there are %s", what, id, strings.Join(known, ", "))
	case len(like) > 0:
		return invalid(field, "there is no %s %q; most like it: %s; `%s` shows all %d", what, id, strings.Join(like, ", "), all, len(known))
	}
	return invalid(field, "there is no %s %q, nor one like it; `%s` shows all %d", what, id, all, len(known))
}

// nearest returns the ids that share most with one that does not exist, best first: one within the other, or else the
// same pairs of characters.
func nearest(id string, ids []string, most int) []string {
	pairs := func(s string) map[string]bool {
		m := map[string]bool{}
		for i := range max(len(s)-1, 0) {
			m[s[i:i+2]] = true
		}
		return m
	}
	of, likeness := pairs(id), map[string]float64{}
	for _, other := range ids {
		theirs, same := pairs(other), 0
		for p := range of {
			if theirs[p] {
				same++
			}
		}
		l := 2 * float64(same) / float64(max(len(of)+len(theirs), 1))
		if len(id) > 2 && strings.Contains(other, id) || len(other) > 2 && strings.Contains(id, other) {
			l++
		}
		if l >= 0.5 {
			likeness[other] = l
		}
	}
	like := slices.SortedFunc(maps.Keys(likeness), func(a, b string) int {
		return cmp.Or(cmp.Compare(likeness[b], likeness[a]), strings.Compare(a, b))
	})
	return like[:min(len(like), most)]
}

// parseUnblock reads NAME or *.NAME, and @INSTANT if it ends some time.
func parseUnblock(s string, now time.Time) (*userv1.Unblock, error) {
	name, until, ends := strings.Cut(s, "@")
	u := new(userv1.Unblock)
	var err error
	name, u.Subtree = strings.CutPrefix(name, "*.")
	if u.Name, err = canonicalName("unblocks", name); err != nil {
		return nil, invalid("unblocks", "%s; what is let through is NAME or *.NAME, for a while NAME@+1h", strings.TrimPrefix(statusMessage(err), "unblocks: "))
	}
	if ends {
		if u.Until, err = parseInstant("unblocks", until, now); err != nil {
			return nil, err
		}
		if u.Until <= now.Unix() {
			return nil, invalid("unblocks", "%q is over already", s)
		}
	}
	return u, nil
}

// parseRewrite reads NAME=RECORD[;RECORD…].
func parseRewrite(s string) (*userv1.Rewrite, error) {
	name, records, ok := strings.Cut(s, "=")
	if !ok {
		return nil, invalid("rewrites", "%q is not NAME=RECORD[;RECORD…]", s)
	}
	r := new(userv1.Rewrite)
	r.Name = name
	for rec := range strings.SplitSeq(records, ";") {
		r.Records = append(r.Records, strings.TrimSpace(rec))
	}
	return r, checkRewrite("rewrites", r)
}

// checkRewrite checks a rewrite and brings it into the form that is stored.
func checkRewrite(field string, r *userv1.Rewrite) error {
	rest, star := strings.CutPrefix(r.Name, "*.")
	n, err := canonicalName(field, rest)
	if err != nil {
		return err
	}
	if r.Name = n; star {
		r.Name = "*." + n
	}
	if len(r.Records) == 0 || len(r.Records) > maxRecords {
		return invalid(field, "%s has %d records; 1 to %d are possible", r.Name, len(r.Records), maxRecords)
	}
	if r.Ttl > 86400 {
		return invalid(field, "%s has a TTL of %d s; at most 86400", r.Name, r.Ttl)
	}
	for i, rec := range r.Records {
		typ, data, _ := strings.Cut(strings.TrimSpace(rec), " ")
		typ, data = strings.ToUpper(typ), strings.TrimSpace(data)
		alone := false
		switch typ {
		case "NXDOMAIN", "NODATA", "REFUSED":
			alone = true
			if data != "" {
				return invalid(field, "%s takes nothing after it, not %q", typ, data)
			}
			r.Records[i] = typ
			if len(r.Records) > 1 {
				return invalid(field, "%s stands alone", typ)
			}
			continue
		case "A", "AAAA":
			a, err := netip.ParseAddr(data)
			if err != nil || a.Zone() != "" || a.Is4() != (typ == "A") {
				return invalid(field, "%q is not the address of an %s record", data, typ)
			}
			data = a.String()
		case "CNAME":
			alone = true
			if data, err = canonicalName(field, data); err != nil {
				return err
			}
		case "TXT", "MX", "PTR", "SRV", "HTTPS", "SVCB", "NS", "CAA":
			if data == "" || len(data) > 4096 {
				return invalid(field, "%s needs data of at most 4096 bytes", typ)
			}
			if err := checkText(field, data, 4096); err != nil {
				return err
			}
			if _, err := resolver.ParseLocal(".", typ+" "+data); err != nil {
				return invalid(field, "%q is no record: %v", rec, err)
			}
		default:
			return invalid(field, "%q begins with none of A, AAAA, CNAME, TXT, MX, PTR, SRV, HTTPS, SVCB, NS, CAA, NXDOMAIN, NODATA, REFUSED", rec)
		}
		if alone && len(r.Records) > 1 {
			return invalid(field, "%s stands alone", typ)
		}
		r.Records[i] = typ + " " + data
	}
	return nil
}

var weekdays = map[string]int{"mon": 0, "tue": 1, "wed": 2, "thu": 3, "fri": 4, "sat": 5, "sun": 6}

const scheduleForm = "ID=ACTION;DAYS FROM-TO;…;WHAT;ZONE"

// parseSchedule reads ID=ACTION;DAYS FROM-TO;…;WHAT;ZONE, where WHAT is "everything" or any of
// services:A,B lists:A,B categories:A,B, each a part of its own, and ZONE may be left out.
func (v *view) parseSchedule(s string) (*userv1.Schedule, error) {
	id, rest, ok := strings.Cut(s, "=")
	if !ok {
		return nil, invalid("schedules", "%q is not %s", s, scheduleForm)
	}
	parts := strings.Split(rest, ";")
	action, err := parseEnum("schedules", parts[0], userv1.ScheduleAction(0).Descriptor())
	if err != nil {
		return nil, err
	}
	sch := &userv1.Schedule{Id: id, Action: userv1.ScheduleAction(action)}
	for _, part := range parts[1:] {
		part = strings.TrimSpace(part)
		what, ids, named := strings.Cut(part, ":")
		dst := map[string]*[]string{"services": &sch.Services, "lists": &sch.Lists, "categories": &sch.Categories}[what]
		switch {
		case named && dst != nil:
			*dst = append(*dst, strings.Split(ids, ",")...)
		case part == "everything":
			sch.Everything = true
		case strings.Contains(part, " "):
			w, err := parseWindow(part)
			if err != nil {
				return nil, err
			}
			sch.Windows = append(sch.Windows, w)
		case strings.Contains(part, ":"):
			if from, to, ok := strings.Cut(part, "-"); ok && named {
				if _, err := parseMinute(from); err == nil {
					return nil, invalid("schedules", "%s-%s is on no day; write for example daily %s-%s", from, to, from, to)
				}
			}
			return nil, invalid("schedules", "%q is none of services:…, categories:… and lists:…, nor everything", part)
		case part == "daily" || weekdaysOf(part):
			return nil, invalid("schedules", "%q has no times; write for example %s 22:00-07:00", part, part)
		case sch.TimeZone != "":
			return nil, invalid("schedules", "%s cannot have %q and %q for its time zone; it is written %s, where WHAT is services:…, categories:…, lists:… or everything", id, sch.TimeZone, part, scheduleForm)
		default:
			sch.TimeZone = part
		}
	}
	return sch, v.checkSchedule("schedules", sch)
}

// weekdaysOf reports whether a part begins with a day.
func weekdaysOf(part string) bool {
	first, _, _ := strings.Cut(strings.ToLower(part), ",")
	first, _, _ = strings.Cut(first, "-")
	_, ok := weekdays[first]
	return ok
}

// parseWindow reads DAYS FROM-TO, such as "mon-fri,sun 22:00-07:00".
func parseWindow(s string) (*userv1.Window, error) {
	days, times, _ := strings.Cut(s, " ")
	w := new(userv1.Window)
	for part := range strings.SplitSeq(strings.ToLower(days), ",") {
		if part == "daily" {
			w.Days = 0x7f
			continue
		}
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, ok1 := weekdays[first]
		to, ok2 := weekdays[last]
		if !ok1 || !ok2 {
			return nil, invalid("schedules", "%q is not a day or range of days such as mon-fri, nor daily", part)
		}
		for d := from; ; d = (d + 1) % 7 {
			w.Days |= 1 << d
			if d == to {
				break
			}
		}
	}
	first, last, ok := strings.Cut(strings.TrimSpace(times), "-")
	from, err1 := parseMinute(first)
	to, err2 := parseMinute(last)
	if !ok || err1 != nil || err2 != nil || from >= 1440 {
		if strings.Contains(times, ",") {
			return nil, invalid("schedules", "%q is more than one span; write DAYS FROM-TO of each and ; between them", times)
		}
		return nil, invalid("schedules", "%q is not a span of a day such as 22:00-07:00", times)
	}
	if to == from {
		return nil, invalid("schedules", "%q begins and ends at once; the whole day is 00:00-24:00", times)
	}
	if to < from { // into the next day
		to += 1440
	}
	w.From, w.To = from, to
	return w, nil
}

func parseMinute(s string) (uint32, error) {
	h, m, ok := strings.Cut(s, ":")
	hour, err1 := strconv.ParseUint(h, 10, 8)
	minute, err2 := strconv.ParseUint(m, 10, 8)
	if !ok || err1 != nil || err2 != nil || hour > 24 || minute > 59 || hour == 24 && minute > 0 {
		return 0, fmt.Errorf("%q is not a time of day", s)
	}
	return uint32(hour*60 + minute), nil
}

func (v *view) checkSchedule(field string, s *userv1.Schedule) error {
	if err := checkID(field, s.Id); err != nil {
		return err
	}
	if s.Action == userv1.ScheduleAction_SCHEDULE_ACTION_UNSPECIFIED {
		return invalid(field, "%s does neither block nor pause", s.Id)
	}
	if _, err := time.LoadLocation(s.TimeZone); err != nil || s.TimeZone == "Local" {
		return invalid(field, "%s: %q is not a time zone such as Europe/Nicosia", s.Id, s.TimeZone)
	}
	if len(s.Windows) == 0 || len(s.Windows) > maxWindows {
		return invalid(field, "%s has %d windows; 1 to %d are possible", s.Id, len(s.Windows), maxWindows)
	}
	for _, w := range s.Windows {
		if w.Days == 0 || w.Days > 0x7f || w.From > 1439 || w.To <= w.From || w.To > w.From+1440 {
			return invalid(field, "%s has a window with days %#x from %d to %d", s.Id, w.Days, w.From, w.To)
		}
	}
	if !s.Everything && len(s.Services)+len(s.Categories)+len(s.Lists) == 0 {
		return invalid(field, "%s concerns nothing; name services, categories or lists, or everything", s.Id)
	}
	for what, ids := range map[string][]string{"service": s.Services, "category": s.Categories, "list": s.Lists} {
		for _, id := range ids {
			if err := v.refer(field, what, id); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkSettings checks settings that came whole, as in an import, by the rules of assign.
func (v *view) checkSettings(field string, s *userv1.Settings) error {
	if s == nil {
		return nil
	}
	for key, set := range map[string]*userv1.StringSet{"lists": s.Lists, "services": s.Services, "categories": s.Categories,
		"safe_search": s.SafeSearch, "allow_networks": s.AllowNetworks, "deny_networks": s.DenyNetworks, "block_types": s.BlockTypes,
		"allow_domains": s.AllowDomains, "deny_domains": s.DenyDomains, "rebinding_exceptions": s.RebindingExceptions} {
		for i, value := range set.GetValues() {
			canon, err := v.member(key, value)
			if err != nil {
				return err
			}
			set.Values[i] = canon
		}
		if n := len(set.GetValues()) + len(set.GetRemoved()); n > maxSet {
			return invalid(field+"."+key, "has %d members; at most %d", n, maxSet)
		}
	}
	for key, n := range map[string]*uint32{"block_ttl": s.BlockTtl, "log_retention": s.LogRetention, "rate_limit": s.RateLimit, "rate_burst": s.RateBurst} {
		if n != nil && uint64(*n) > numberLimits[key].most {
			return invalid(field+"."+key, "%d is more than %d", *n, numberLimits[key].most)
		}
	}
	for key, a := range map[string]*string{"block_ipv4": s.BlockIpv4, "block_ipv6": s.BlockIpv6} {
		if a == nil || *a == "" {
			continue
		}
		if ip, err := netip.ParseAddr(*a); err != nil || ip.Is4() != (key == "block_ipv4") {
			return invalid(field+"."+key, "%q is not such an address", *a)
		}
	}
	if userv1.BlockMode_name[int32(s.Mode)] == "" {
		return invalid(field+".mode", "%d is unknown", s.Mode)
	}
	if userv1.LogPrivacy_name[int32(s.Log)] == "" {
		return invalid(field+".log", "%d is unknown", s.Log)
	}
	for _, l := range s.OwnLists.GetValues() {
		if err := v.settleOwnList(field+".own_lists", l); err != nil {
			return err
		}
	}
	for _, r := range s.Rewrites.GetValues() {
		if err := checkRewrite(field+".rewrites", r); err != nil {
			return err
		}
	}
	for _, u := range s.Unblocks.GetValues() {
		n, err := canonicalName(field+".unblocks", u.Name)
		if err != nil {
			return err
		}
		u.Name = n
	}
	for _, sch := range s.Schedules.GetValues() {
		if err := v.checkSchedule(field+".schedules", sch); err != nil {
			return err
		}
	}
	if len(s.Rewrites.GetValues()) > maxRewrites || len(s.Unblocks.GetValues()) > maxRewrites || len(s.Schedules.GetValues()) > maxSchedules {
		return invalid(field, "has more than %d rewrites or unblocks, or %d schedules", maxRewrites, maxSchedules)
	}
	return nil
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
