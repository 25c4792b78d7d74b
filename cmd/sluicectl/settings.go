package main

import (
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

// parseAssignment reads KEY=VALUE, KEY+=VALUE or KEY-=VALUE. A key may have "settings." in front, which is
// where most keys stand in the records.
func parseAssignment(s string) (*adminv1.Assignment, error) {
	key, value, ok := strings.Cut(s, "=")
	as := &adminv1.Assignment{Operation: adminv1.Operation_OPERATION_SET, Value: value}
	if rest, plus := strings.CutSuffix(key, "+"); plus {
		key, as.Operation = rest, adminv1.Operation_OPERATION_ADD
	} else if rest, minus := strings.CutSuffix(key, "-"); minus {
		key, as.Operation = rest, adminv1.Operation_OPERATION_REMOVE
	}
	as.Key = strings.TrimPrefix(key, "settings.")
	if !ok || !isKey(as.Key) {
		return nil, usagef("assignments", "%q is none of KEY=VALUE, KEY+=VALUE, KEY-=VALUE", s)
	}
	return as, nil
}

func isKey(s string) bool {
	return s != "" && s[0] >= 'a' && s[0] <= 'z' && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789_") == ""
}

func settingFields() protoreflect.FieldDescriptors {
	return new(userv1.Settings).ProtoReflect().Descriptor().Fields()
}

// settingKeys are the fields of the settings message.
func settingKeys() []string {
	fields := settingFields()
	var keys []string
	for i := range fields.Len() {
		keys = append(keys, string(fields.Get(i).Name()))
	}
	slices.Sort(keys)
	return keys
}

// recordKeys are fields of records that can be set too.
var recordKeys = []string{"auto_devices", "disabled", "max_devices", "name", "policy", "tenant"}

// similarKey returns the key that somebody who wrote another may have meant, "" if the key exists or none is
// like it.
func similarKey(key string) string {
	known := append(settingKeys(), recordKeys...)
	if slices.Contains(known, key) {
		return ""
	}
	best, least := "", len(key)/4+2 // fewer slips than this are forgiven
	for _, k := range known {
		d := distance(key, k)
		if strings.HasPrefix(k, key) && len(key) >= 3 {
			d = min(d, 1)
		}
		if d < least {
			best, least = k, d
		}
	}
	return best
}

// distance counts the letters to insert, remove, replace or swap with a neighbour to make b of a.
func distance(a, b string) int {
	rows := [3][]int{make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)}
	for j := range rows[1] {
		rows[1][j] = j
	}
	for i := range len(a) {
		before, last, row := rows[0], rows[1], rows[2]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = min(row[j]+1, last[j+1]+1, last[j]+cost)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
		rows = [3][]int{last, row, before}
	}
	return rows[1][len(b)]
}

// enumNames are the values of an enum as people write them: without the enum's prefix, in lower case.
func enumNames(e protoreflect.EnumDescriptor) []string {
	values := e.Values()
	var names []string
	for i := 1; i < values.Len(); i++ { // 0 is "unspecified"
		names = append(names, enumName(e, values.Get(i).Number()))
	}
	return names
}

func enumName(e protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	d := e.Values().ByNumber(n)
	if d == nil {
		return fmt.Sprint(n)
	}
	prefix := strings.TrimSuffix(string(e.Values().ByNumber(0).Name()), "UNSPECIFIED")
	return strings.ToLower(strings.TrimPrefix(string(d.Name()), prefix))
}

// assignments writes settings as `policy set` takes them, in order of field.
func assignments(s *userv1.Settings) []string {
	if s == nil {
		return nil
	}
	var out []string
	m := s.ProtoReflect()
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if !m.Has(f) {
			continue
		}
		key, v := string(f.Name()), m.Get(f)
		switch f.Kind() {
		case protoreflect.MessageKind:
			out = append(out, setAssignments(key, v.Message())...)
		case protoreflect.EnumKind:
			out = append(out, key+"="+enumName(f.Enum(), v.Enum()))
		default:
			out = append(out, key+"="+scalar(key, v))
		}
	}
	return out
}

// scalar writes a value that is no set.
func scalar(key string, v protoreflect.Value) string {
	switch key {
	case "block_ttl", "log_retention":
		return (time.Duration(v.Uint()) * time.Second).String()
	case "paused_until":
		return instant(v.Int())
	}
	return v.String()
}

// instant writes Unix seconds for people; 0 means something and stays.
func instant(t int64) string {
	if t == 0 {
		return "0"
	}
	return when(t)
}

// setAssignments writes a set. All sets have the fields replace, values and removed.
func setAssignments(key string, set protoreflect.Message) []string {
	fields := set.Descriptor().Fields()
	values, removed := set.Get(fields.ByName("values")).List(), set.Get(fields.ByName("removed")).List()
	op := "+="
	if set.Get(fields.ByName("replace")).Bool() {
		op = "="
	}
	var out, plain []string
	for i := range values.Len() {
		switch v := values.Get(i).Interface().(type) {
		case string:
			plain = append(plain, v)
		case protoreflect.Message:
			// One assignment each: the text of a schedule has commas of its own.
			out = append(out, key+op+member(v.Interface()))
			op = "+="
		}
	}
	switch {
	case len(plain) > 0:
		out = append(out, key+op+strings.Join(plain, ","))
	case op == "=": // nothing, whatever lies beneath
		out = append(out, key+"=-")
	}
	plain = nil
	for i := range removed.Len() {
		plain = append(plain, removed.Get(i).String())
	}
	if len(plain) > 0 {
		out = append(out, key+"-="+strings.Join(plain, ","))
	}
	return out
}

// member writes a member of a set that is a message.
func member(m protoreflect.ProtoMessage) string {
	switch m := m.(type) {
	case *userv1.OwnList:
		if m.GetUrl() != "" {
			return m.GetId() + "=" + m.GetUrl()
		}
		return m.GetId() + "=" + hex.EncodeToString(m.GetSha256())
	case *userv1.Rewrite:
		return m.GetName() + "=" + strings.Join(m.GetRecords(), ";")
	case *userv1.Unblock:
		s := m.GetName()
		if m.GetSubtree() {
			s = "*." + s
		}
		if m.GetUntil() != 0 {
			s += "@" + when(m.GetUntil())
		}
		return s
	case *userv1.Schedule:
		parts := []string{m.GetId() + "=" + enumName(m.GetAction().Descriptor(), m.GetAction().Number())}
		for _, w := range m.GetWindows() {
			parts = append(parts, days(w.GetDays())+" "+minute(w.GetFrom())+"-"+minute(w.GetTo()))
		}
		for _, x := range []struct {
			what string
			ids  []string
		}{{"services:", m.GetServices()}, {"categories:", m.GetCategories()}, {"lists:", m.GetLists()}} {
			if len(x.ids) > 0 {
				parts = append(parts, x.what+strings.Join(x.ids, ","))
			}
		}
		if m.GetEverything() {
			parts = append(parts, "everything")
		}
		if m.GetTimeZone() != "" {
			parts = append(parts, m.GetTimeZone())
		}
		return strings.Join(parts, ";")
	}
	return ""
}

var dayNames = [...]string{"mon", "tue", "wed", "thu", "fri", "sat", "sun"}

// days writes a set of days as ranges.
func days(set uint32) string {
	if set&0x7f == 0x7f {
		return "daily"
	}
	var parts []string
	for d := 0; d < 7; d++ {
		if set>>d&1 == 0 {
			continue
		}
		first := d
		for d < 6 && set>>(d+1)&1 != 0 {
			d++
		}
		part := dayNames[first]
		if d > first {
			part += "-" + dayNames[d]
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, ",")
}

// minute writes a minute of a day. A window may end on the next day, which its times alone show.
func minute(m uint32) string {
	if m > 24*60 {
		m -= 24 * 60
	}
	return fmt.Sprintf("%02d:%02d", m/60, m%60)
}
