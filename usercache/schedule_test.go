package usercache

import (
	"testing"
	"time"
)

// T01 and T02, windows over midnight, and days on which an hour is missing or comes twice.
func TestScheduleWindows(t *testing.T) {
	const sunday, saturday, daily = 1 << 6, 1 << 5, 0x7f
	hm := func(h, m uint16) uint16 { return h*60 + m }
	for _, c := range []struct {
		what, zone string
		windows    []Window
		at         string // RFC 3339
		active     bool
	}{
		{"T01 begins", "Europe/Brussels", []Window{{sunday, hm(12, 0), hm(14, 0)}}, "2026-11-29T12:00:00+01:00", true},
		{"T01 before", "Europe/Brussels", []Window{{sunday, hm(12, 0), hm(14, 0)}}, "2026-11-29T11:59:59+01:00", false},
		{"T01 last second", "Europe/Brussels", []Window{{sunday, hm(12, 0), hm(14, 0)}}, "2026-11-29T13:59:59+01:00", true},
		{"T01 ends", "Europe/Brussels", []Window{{sunday, hm(12, 0), hm(14, 0)}}, "2026-11-29T14:00:00+01:00", false},
		{"T01 Monday", "Europe/Brussels", []Window{{sunday, hm(12, 0), hm(14, 0)}}, "2026-11-30T13:00:00+01:00", false},
		{"T01 in UTC", "Europe/Brussels", []Window{{sunday, hm(12, 0), hm(14, 0)}}, "2026-11-29T11:00:00Z", true},
		{"T01 in UTC, ends", "Europe/Brussels", []Window{{sunday, hm(12, 0), hm(14, 0)}}, "2026-11-29T13:00:00Z", false},
		{"T02 all day", "UTC", []Window{{sunday, 0, hm(24, 0)}}, "2026-11-29T23:59:59Z", true},
		{"T02 next day", "UTC", []Window{{sunday, 0, hm(24, 0)}}, "2026-11-30T00:00:00Z", false},
		{"overnight, evening", "UTC", []Window{{saturday, hm(22, 0), hm(31, 0)}}, "2026-11-28T22:00:00Z", true},
		{"overnight, morning", "UTC", []Window{{saturday, hm(22, 0), hm(31, 0)}}, "2026-11-29T06:59:59Z", true},
		{"overnight, over", "UTC", []Window{{saturday, hm(22, 0), hm(31, 0)}}, "2026-11-29T07:00:00Z", false},
		{"overnight, the morning before", "UTC", []Window{{saturday, hm(22, 0), hm(31, 0)}}, "2026-11-28T05:00:00Z", false},
		{"several a day", "UTC", []Window{{daily, hm(8, 0), hm(9, 0)}, {daily, hm(18, 0), hm(19, 0)}}, "2026-11-28T18:30:00Z", true},
		{"several a day, between", "UTC", []Window{{daily, hm(8, 0), hm(9, 0)}, {daily, hm(18, 0), hm(19, 0)}}, "2026-11-28T12:00:00Z", false},
		// On 25 October 2026 03:00 in Berlin becomes 02:00: what is said of 02:30 holds both times.
		{"the hour that comes twice, first", "Europe/Berlin", []Window{{daily, hm(2, 15), hm(2, 45)}}, "2026-10-25T00:30:00Z", true},
		{"the hour that comes twice, second", "Europe/Berlin", []Window{{daily, hm(2, 15), hm(2, 45)}}, "2026-10-25T01:30:00Z", true},
		{"after it", "Europe/Berlin", []Window{{daily, hm(2, 15), hm(2, 45)}}, "2026-10-25T02:30:00Z", false},
		// On 29 March 2026 02:00 becomes 03:00: a window within does not come, one that begins there begins at 03:00.
		{"the hour that is missing", "Europe/Berlin", []Window{{daily, hm(2, 15), hm(2, 45)}}, "2026-03-29T01:00:00Z", false},
		{"before the missing hour", "Europe/Berlin", []Window{{daily, hm(2, 30), hm(4, 0)}}, "2026-03-29T00:59:59Z", false},
		{"a window that begins in the missing hour", "Europe/Berlin", []Window{{daily, hm(2, 30), hm(4, 0)}}, "2026-03-29T01:00:00Z", true},
		{"and ends as it says", "Europe/Berlin", []Window{{daily, hm(2, 30), hm(4, 0)}}, "2026-03-29T02:00:00Z", false},
		{"overnight into the short night", "Europe/Berlin", []Window{{saturday, hm(22, 0), hm(31, 0)}}, "2026-03-29T04:59:59Z", true},
		{"overnight into the short night, over", "Europe/Berlin", []Window{{saturday, hm(22, 0), hm(31, 0)}}, "2026-03-29T05:00:00Z", false},
		// The day begins first on Kiritimati, fourteen hours ahead.
		{"far ahead", "Pacific/Kiritimati", []Window{{sunday, hm(0, 0), hm(1, 0)}}, "2026-11-28T10:00:00Z", true},
		{"far ahead, before", "Pacific/Kiritimati", []Window{{sunday, hm(0, 0), hm(1, 0)}}, "2026-11-28T09:59:59Z", false},
		{"far ahead, over", "Pacific/Kiritimati", []Window{{sunday, hm(0, 0), hm(1, 0)}}, "2026-11-28T11:00:00Z", false},
		{"three quarters of an hour", "Asia/Kathmandu", []Window{{sunday, hm(0, 0), hm(1, 0)}}, "2026-11-28T18:15:00Z", true},
		{"three quarters of an hour, before", "Asia/Kathmandu", []Window{{sunday, hm(0, 0), hm(1, 0)}}, "2026-11-28T18:14:59Z", false},
		{"with summer time too", "Pacific/Chatham", []Window{{sunday, hm(9, 0), hm(10, 0)}}, "2026-11-28T19:15:00Z", true},
		{"with summer time too, over", "Pacific/Chatham", []Window{{sunday, hm(9, 0), hm(10, 0)}}, "2026-11-28T20:15:00Z", false},
		// On Lord Howe summer time is half an hour: on 4 October 2026 02:00 becomes 02:30, on 5 April 02:00 became 01:30.
		{"half an hour that is missing", "Australia/Lord_Howe", []Window{{daily, hm(2, 0), hm(2, 30)}}, "2026-10-03T15:30:00Z", false},
		{"a window that begins in it, before", "Australia/Lord_Howe", []Window{{daily, hm(2, 15), hm(4, 0)}}, "2026-10-03T15:29:59Z", false},
		{"a window that begins in it", "Australia/Lord_Howe", []Window{{daily, hm(2, 15), hm(4, 0)}}, "2026-10-03T15:30:00Z", true},
		{"and ends by summer time", "Australia/Lord_Howe", []Window{{daily, hm(2, 15), hm(4, 0)}}, "2026-10-03T17:00:00Z", false},
		{"half an hour that comes twice, first", "Australia/Lord_Howe", []Window{{daily, hm(1, 30), hm(2, 0)}}, "2026-04-04T14:30:00Z", true},
		{"half an hour that comes twice, second", "Australia/Lord_Howe", []Window{{daily, hm(1, 30), hm(2, 0)}}, "2026-04-04T15:29:59Z", true},
		{"half an hour that comes twice, over", "Australia/Lord_Howe", []Window{{daily, hm(1, 30), hm(2, 0)}}, "2026-04-04T15:30:00Z", false},
		// In Morocco clocks go back for Ramadan alone, in 2026 from 15 February to 22 March.
		{"Ramadan", "Africa/Casablanca", []Window{{daily, hm(12, 0), hm(13, 0)}}, "2026-03-01T12:00:00Z", true},
		{"Ramadan, before", "Africa/Casablanca", []Window{{daily, hm(12, 0), hm(13, 0)}}, "2026-03-01T11:59:59Z", false},
		{"the rest of the year", "Africa/Casablanca", []Window{{daily, hm(12, 0), hm(13, 0)}}, "2026-04-01T11:00:00Z", true},
		{"the rest of the year, over", "Africa/Casablanca", []Window{{daily, hm(12, 0), hm(13, 0)}}, "2026-04-01T12:00:00Z", false},
		// Samoa had no 30 December 2011, a Friday.
		{"Thursday, the last second", "Pacific/Apia", []Window{{1 << 3, 0, hm(24, 0)}}, "2011-12-30T09:59:59Z", true},
		{"no Friday", "Pacific/Apia", []Window{{1 << 4, 0, hm(24, 0)}}, "2011-12-30T10:00:00Z", false},
		{"but Saturday", "Pacific/Apia", []Window{{saturday, 0, hm(24, 0)}}, "2011-12-30T10:00:00Z", true},
	} {
		loc, err := location(c.zone)
		if err != nil {
			t.Fatal(err)
		}
		at, err := time.Parse(time.RFC3339, c.at)
		if err != nil {
			t.Fatal(err)
		}
		s := Schedule{Location: loc, Windows: c.windows}
		if s.Active(at) != c.active {
			t.Errorf("%s: at %s %v", c.what, c.at, !c.active)
		}
	}
}

// Names of zones mean the same everywhere, or nothing.
func TestZoneNames(t *testing.T) {
	for name, good := range map[string]bool{"": true, "UTC": true, "Europe/Nicosia": true, "Local": false, "Europe/Nikosia": false, "../etc/passwd": false, "/etc/localtime": false, "EST5EDT5": false} {
		if _, err := location(name); (err == nil) != good {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestDomains(t *testing.T) {
	d := newDomains([]string{"example.org", "a.b.test", "Upper.example", "", "..", "bad..label"})
	for wire, want := range map[string]bool{
		"\x07example\x03org\x00": true, "\x01x\x07example\x03org\x00": true, "\x08xexample\x03org\x00": false, "\x03org\x00": false, "\x00": false,
		"\x01b\x04test\x00": false, "\x01z\x01a\x01b\x04test\x00": true, "\x05upper\x07example\x00": true, "": false,
	} {
		if d.Has(wire) != want {
			t.Errorf("%q: %v", wire, !want)
		}
	}
	if len(d) != 3 {
		t.Errorf("%q", d)
	}
	open := Details{DenyDomains: newDomains([]string{"deny.example"})}
	closed := Details{AllowDomains: newDomains([]string{"example"}), DenyDomains: open.DenyDomains}
	for wire, want := range map[string][2]bool{"\x04deny\x07example\x00": {}, "\x02ok\x07example\x00": {true, true}, "\x04test\x00": {true, false}} {
		if got := [2]bool{open.AdmitsName(wire), closed.AdmitsName(wire)}; got != want {
			t.Errorf("%q: %v, want %v", wire, got, want)
		}
	}
}
