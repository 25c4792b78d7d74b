package selection

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

var rewrite = flag.Bool("rewrite", false, "write what happened into the scenario files")

// TestScenarios plays testdata/*.txt. Indented lines are what a command printed; pick asks ten thousand times,
// each time from the same state, and prints what share each server got.
func TestScenarios(t *testing.T) {
	files, _ := filepath.Glob("testdata/*.txt")
	if len(files) == 0 {
		t.Fatal("no scenarios")
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var got bytes.Buffer
			p := player{s: New(Options{Seed: [32]byte{1}}), now: clock.Instant(time.Hour)}
			lines := bufio.NewScanner(bytes.NewReader(text))
			for lines.Scan() {
				line := lines.Text()
				if strings.HasPrefix(line, "  ") {
					continue
				}
				fmt.Fprintln(&got, line)
				if f := strings.Fields(line); len(f) > 0 && f[0] != "#" {
					for _, out := range p.play(f) {
						fmt.Fprintln(&got, "  "+out)
					}
				}
			}
			if bytes.Equal(got.Bytes(), text) {
				return
			}
			if *rewrite {
				os.WriteFile(file, got.Bytes(), 0o644)
				return
			}
			t.Errorf("played otherwise; go test -rewrite, and read the difference:\n%s", got.String())
		})
	}
}

type player struct {
	s   *Selector
	now clock.Instant
}

func addr(s string) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(s), 53) }

func duration(s string) time.Duration {
	d, err := time.ParseDuration(s)
	if err != nil {
		panic(err)
	}
	return d
}

var zone = dnsname.MustParse("example.")

func (p *player) play(f []string) []string {
	lacks := map[string]Lack{"edns": LackEDNS, "options": LackOptions, "case": LackCase, "udp": LackUDP}
	switch f[0] {
	case "wait":
		p.now = p.now.Add(duration(f[1]))
	case "answer":
		p.s.Answered(p.now, addr(f[1]), duration(f[2]))
	case "timeout": // of a question sent just after whatever happened before
		p.s.TimedOut(p.now, addr(f[1]), p.now)
	case "together": // timeouts of questions that were sent at once, noticed at once
		for range 5 {
			p.s.TimedOut(p.now, addr(f[1]), p.now.Add(-time.Second))
		}
	case "lame":
		p.s.Lame(p.now, addr(f[1]), zone, duration(f[2]))
	case "serves":
		p.s.Serves(addr(f[1]), zone)
	case "lacking":
		p.s.Lacking(p.now, addr(f[1]), lacks[f[2]])
	case "able":
		p.s.Able(p.now, addr(f[1]), lacks[f[2]])
	case "show":
		v, ok := p.s.Look(p.now, addr(f[1]))
		if !ok {
			return []string{"unknown"}
		}
		out := fmt.Sprintf("srtt %v, %d timeouts", v.SRTT.Round(time.Microsecond), v.Timeouts)
		for _, w := range []struct {
			on   bool
			word string
		}{{v.Resting, "resting"}, {v.EDNS, "edns"}, {v.NoEDNS, "no-edns"}, {v.NoOptions, "no-options"}, {v.NoCase, "no-case"}, {v.TCP, "tcp"}} {
			if w.on {
				out += ", " + w.word
			}
		}
		return []string{out}
	case "once", "pick":
		var servers []netip.AddrPort
		for _, a := range f[1:] {
			servers = append(servers, addr(a))
		}
		if f[0] == "once" {
			c, ok := p.s.Pick(p.now, zone, servers, nil)
			return []string{describe(c, ok)}
		}
		return p.shares(servers)
	default:
		panic("unknown command " + f[0])
	}
	return nil
}

func describe(c Choice, ok bool) string {
	if !ok {
		return "nobody"
	}
	out := fmt.Sprintf("%v within %v", c.Server.Addr(), c.Patience.Round(100*time.Millisecond/4))
	if c.Probe {
		out += ", a probe"
	}
	if c.Lame {
		out += ", though lame"
	}
	return out
}

// shares picks often, each time forgetting that a probe is under way, and gives shares to the nearest tenth.
func (p *player) shares(servers []netip.AddrPort) (out []string) {
	count := make(map[string]int)
	const n = 10000
	for range n {
		c, ok := p.s.Pick(p.now, zone, servers, nil)
		count[describe(c, ok)]++
		for _, r := range p.s.records {
			r.probing = 0
		}
	}
	for what, k := range count {
		share := "rarely"
		if tenths := (k*10 + n/2) / n; tenths > 0 {
			share = fmt.Sprintf("%d0%%", tenths)
		}
		out = append(out, share+" "+what)
	}
	slices.Sort(out)
	return out
}

func TestNewRTT(t *testing.T) {
	for _, d := range []time.Duration{-1, -time.Hour, maxRTT + 1, 1 << 62, -1 << 63} {
		if _, ok := NewRTT(d); ok {
			t.Errorf("NewRTT(%v) is accepted", d)
		}
	}
	for _, d := range []time.Duration{0, 1, time.Millisecond, maxRTT} {
		if r, ok := NewRTT(d); !ok || r.d < time.Microsecond {
			t.Errorf("NewRTT(%v) = %v, %v", d, r, ok)
		}
	}
}

// A refused sample resets the server's state instead of entering the average (incident I5).
func TestRefusedSampleForgets(t *testing.T) {
	s := New(Options{})
	a := addr("192.0.2.1")
	for range 20 {
		s.Answered(1, a, 20*time.Millisecond)
	}
	s.Answered(1, a, -time.Second)
	if v, _ := s.Look(1, a); v.SRTT != 0 || v.Timeouts != 0 {
		t.Errorf("after a negative sample: %+v", v)
	}
	s.Answered(1, a, 30*time.Millisecond)
	if v, _ := s.Look(1, a); v.SRTT != 30*time.Millisecond {
		t.Errorf("and a good one: %+v", v)
	}
}

func TestTableIsBounded(t *testing.T) {
	const size = 100
	s := New(Options{Size: size, Seed: [32]byte{7}})
	often := addr("192.0.2.1")
	for i := range 10 * size {
		now := clock.Instant(i)
		s.Answered(now, often, time.Millisecond)
		s.Answered(now, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 53), time.Millisecond)
		if s.Len() > size || len(s.byAddr) != s.Len() {
			t.Fatalf("%d records, %d in the map", s.Len(), len(s.byAddr))
		}
	}
	if _, ok := s.Look(0, often); !ok || s.Len() != size {
		t.Errorf("the server in use all the time is known: %v; %d records", ok, s.Len())
	}
}

// FuzzSelector plays any history, at any instants, with any samples: the choice is always one of the
// candidates, with a sane time to wait, and estimates keep their invariants.
func FuzzSelector(f *testing.F) {
	f.Add([]byte("\x00\x01\x00\x00\x00\x00\x00\x10\x00\x00"))
	f.Add(bytes.Repeat([]byte("\x02\x01\x7f\xff\xff\xff\xff\xff\xff\xff"), 5))
	f.Fuzz(func(t *testing.T, history []byte) {
		s := New(Options{Size: 4, Seed: [32]byte{1}})
		var servers []netip.AddrPort
		for i := range 6 {
			servers = append(servers, netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 53))
		}
		var now clock.Instant
		for len(history) >= 10 {
			op, who, arg := history[0], servers[int(history[1])%len(servers)], int64(binary.BigEndian.Uint64(history[2:]))
			history = history[10:]
			switch op % 8 {
			case 0:
				s.Answered(now, who, time.Duration(arg))
			case 1:
				now = clock.Instant(arg) // any clock, backwards too
			case 2:
				s.TimedOut(now, who, clock.Instant(arg))
			case 3:
				s.Lame(now, who, zone, time.Duration(arg))
			case 4:
				s.Lacking(now, who, Lack(arg))
			case 5:
				s.Able(now, who, Lack(arg))
			case 6:
				s.Alive(now, who)
			}
			c, ok := s.Pick(now, zone, servers, nil)
			if ok && (!slices.Contains(servers, c.Server) || c.Patience < minTimeout/2 || c.Patience > maxTimeout) {
				t.Fatalf("picked %+v", c)
			}
			if !ok {
				for _, a := range servers {
					if r := s.byAddr[a]; r == nil || r.est.rests == 0 {
						t.Fatalf("nobody picked, though %v does not rest", a)
					}
				}
			}
			if s.Len() > 4 {
				t.Fatalf("%d records", s.Len())
			}
			for _, r := range s.records {
				e := r.est
				switch {
				case e.srtt < 0 || e.srtt > maxRTT || e.rttvar < 0 || e.rttvar > maxRTT:
					t.Fatalf("srtt %v, rttvar %v", e.srtt, e.rttvar)
				case (e.rests > 0) != (e.timeouts == restAfter), e.rests == 0 && e.restUntil != 0:
					t.Fatalf("%d timeouts, %d rests, until %v", e.timeouts, e.rests, e.restUntil)
				case e.timeout() < minTimeout || e.timeout() > maxTimeout:
					t.Fatalf("timeout %v", e.timeout())
				}
			}
		}
	})
}

// That a server understands EDNS is believed for an hour after it last showed it, so that one which was replaced by
// something older is not asked in vain for ever.
func TestEDNSIsNotForEver(t *testing.T) {
	s := New(Options{})
	who := netip.MustParseAddrPort("192.0.2.1:53")
	knows := func(now clock.Instant) bool {
		c, ok := s.Pick(now, dnsname.Root, []netip.AddrPort{who}, nil)
		return ok && c.EDNS
	}
	now := clock.Instant(time.Hour)
	if s.Able(now, who, LackEDNS); !knows(now.Add(lackFor - time.Second)) {
		t.Error("forgotten too early")
	}
	if knows(now.Add(lackFor)) {
		t.Error("still believed")
	}
	if s.Able(now.Add(lackFor), who, LackEDNS); !knows(now.Add(2*lackFor - time.Second)) {
		t.Error("not renewed")
	}
}
