package resolver_test

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/answercache"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/exchange"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/resolver/internal/selection"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// Section C: what keeps the cache clean.
//
// The bound of types at one name has no row: entries are found by a hash of name and type, so that there is no
// list of a name's types to grow. Nor has the size of a message: no length prefix can say more than 65,535.

// drawn asks a real server over real sockets and returns the IDs and ports of the queries.
var drawn = sync.OnceValues(func() (ids, ports []uint16) {
	server, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		panic(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 4096)
		for {
			n, from, err := server.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			buf[2] |= 0x80
			server.WriteToUDPAddrPort(buf[:n], from)
			ids, ports = append(ids, uint16(buf[0])<<8|uint16(buf[1])), append(ports, from.Port())
		}
	}()
	transport, err := exchange.NewSockets(exchange.SocketOptions{})
	if err != nil {
		panic(err)
	}
	x := exchange.New(exchange.Options{Transport: transport})
	defer x.Close()
	for range 400 {
		if _, err := x.Ask(context.Background(), query.NewTree(clock.Elapsed(), query.Budget{}), query.Ask{
			Server: server.LocalAddr().(*net.UDPAddr).AddrPort(), Name: dnsname.MustParse("www.example."), Type: dns.TypeA, Class: 1, NoEDNS: true, Timeout: 5 * time.Second,
		}); err != nil {
			panic(err)
		}
	}
	server.Close()
	<-done
	return ids, ports
})

// spread is how many bits the values range over.
func spread(values []uint16) int {
	least, most := values[0], values[0]
	for _, v := range values {
		least, most = min(least, v), max(most, v)
	}
	return bits.Len16(most-least) - 1
}

// lacking says whether a server is believed to lack something after n signs of it, or d later.
func lacking(l selection.Lack, signs int, d time.Duration) string {
	s, at, server := selection.New(selection.Options{}), clock.Instant(time.Hour), netip.MustParseAddrPort("192.0.2.1:53")
	for range signs {
		s.Lacking(at, server, l)
	}
	v, _ := s.Look(at.Add(d), server)
	return fmt.Sprint(map[selection.Lack]bool{selection.LackEDNS: v.NoEDNS, selection.LackCase: v.NoCase, selection.LackOptions: v.NoOptions}[l])
}

// sized is a response over UDP of n bytes, and what the client made of it.
func sized(t *testing.T, n int) (out string) {
	assault(t, zones{zoneAt("size.lab.", victim1, "* A 198.51.100.2")}, nil, func(l *lab) {
		l.hook(victim1, func(q siminternet.Query) *siminternet.Reply {
			name, typ := asked(q)
			if q.Transport == siminternet.TCP || typ != dns.TypeA || name != "www.size.lab." {
				return nil
			}
			r := say(q, true, 0, name+" A 198.51.100.1", "", "").Msg
			wire, err := r.Pack()
			if err != nil {
				panic(err)
			}
			r.IsEdns0().Option = append(r.IsEdns0().Option, &dns.EDNS0_PADDING{Padding: make([]byte, n-len(wire)-4)})
			return &siminternet.Reply{Msg: r}
		})
		m := l.must("www.size.lab.", dns.TypeA)
		tcp := l.sim.Count(func(e siminternet.LogEntry) bool { return e.Transport == siminternet.TCP })
		out = fmt.Sprintf("%s, %d over TCP", text(m), tcp)
	})
	return out
}

// records of a message: n addresses of one name.
func message(n int) string {
	m := new(dns.Msg).SetQuestion("www.example.", dns.TypeA)
	m.Response, m.Compress = true, true
	for i := range n {
		m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: "www.example.", Rrtype: dns.TypeA, Class: 1, Ttl: 60}, A: net.IPv4(10, 0, byte(i>>8), byte(i))})
	}
	wire, err := m.Pack()
	if err != nil {
		return err.Error()
	}
	if _, err := query.ReadMessage(wire); errors.Is(err, query.ErrMalformed) {
		return "malformed"
	} else if err != nil {
		return err.Error()
	}
	return "read"
}

// entry makes a settled answer of n bytes and offers it to the cache of answers.
func entry(n int) string {
	q := question("www.example.", dns.TypeTXT)
	for size := n; size > 0; size-- { // what else an entry holds is its business
		set := query.RRset{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 300}
		for left := size; left > 0; left -= 200 {
			set.Data = query.AppendRData(set.Data, []byte(strings.Repeat("x", min(left, 200))))
		}
		e, err := settled.Settle(&query.Unvalidated{Question: q, Answer: []query.RRset{set}}, query.Insecure, settled.Options{Now: 1, EDE: query.NoEDE})
		if err != nil {
			return err.Error()
		}
		if len(e.Bytes()) > n {
			continue
		} else if len(e.Bytes()) < n {
			return "no entry of that size"
		}
		c := answercache.New(answercache.Options{Bytes: 1 << 20})
		key := dnsname.NewKey([16]byte{1})
		return fmt.Sprintf("kept: %v", c.Put(&q, answercache.Hash(&key, &q), e, 1))
	}
	return "nothing"
}

// askAtOnce asks n questions at once and waits for all answers.
func askAtOnce(t *testing.T, x *exchange.Exchange, n int, ask func(i int) query.Ask) {
	var wg sync.WaitGroup
	for i := range n {
		a := ask(i)
		wg.Go(func() {
			if _, err := x.Ask(context.Background(), query.NewTree(clock.Elapsed(), query.Budget{}), a); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// portsOf asks a real server n different questions over real sockets, of which it answers none until all have come,
// and counts the ports they came from.
func portsOf(t *testing.T, n int) int {
	server, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	ports := map[netip.AddrPort][]byte{}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 4096)
		for range n {
			l, from, err := server.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			buf[2] |= 0x80
			ports[from] = append([]byte(nil), buf[:l]...)
		}
		for to, b := range ports {
			server.WriteToUDPAddrPort(b, to)
		}
	}()
	transport, err := exchange.NewSockets(exchange.SocketOptions{})
	if err != nil {
		t.Fatal(err)
	}
	x := exchange.New(exchange.Options{Transport: transport})
	defer x.Close()
	askAtOnce(t, x, n, func(i int) query.Ask {
		return query.Ask{
			Server: server.LocalAddr().(*net.UDPAddr).AddrPort(), Name: dnsname.MustParse(fmt.Sprintf("w%d.example.", i)), Type: dns.TypeA, Class: 1, NoEDNS: true, Timeout: 10 * time.Second,
		}
	})
	server.Close()
	<-done
	return len(ports)
}

var rowsC = []limitRow{
	{"Kaminsky: bits of the port", "bits", 15, "true", "false", func(t *testing.T, n int) string {
		_, ports := drawn()
		return fmt.Sprint(spread(ports) >= n)
	}},
	{"Kaminsky: bits of the ID", "bits; how many of them vary", 16, "16", "16", func(t *testing.T, n int) string {
		ids, _ := drawn()
		ones, zeros := uint16(0), uint16(0)
		for _, id := range ids {
			ones, zeros = ones|id, zeros|^id
		}
		return some(bits.OnesCount16(ones & zeros))
	}},
	{"birthday: the same question outstanding at a server", "resolutions that want it at once; sent", 1, "1", "1", func(t *testing.T, n int) (out string) {
		slowServer(t, func(x *exchange.Exchange, sim *siminternet.Internet, a query.Ask) {
			askAtOnce(t, x, n, func(int) query.Ask { return a })
			out = some(sentTo(sim))
		})
		return out
	}},
	{"birthday: the same question outstanding for a client subnet", "subnets, each of which two resolutions want it for; sent", 1, "1", "2", func(t *testing.T, n int) (out string) {
		slowServer(t, func(x *exchange.Exchange, sim *siminternet.Internet, a query.Ask) {
			askAtOnce(t, x, 2*n, func(i int) query.Ask {
				a.Subnet = query.Subnet{Family: 1, Bits: 24, Addr: [16]byte{192, 0, byte(i / 2)}}
				return a
			})
			out = some(sentTo(sim))
		})
		return out
	}},
	{"side channels: questions outstanding at one socket", "questions to a server at once; ports that they come from", 1, "1", "2", func(t *testing.T, n int) string {
		return some(portsOf(t, n))
	}},
	{"near misses: false packets before TCP", "packets of a wrong ID before the right response; questions over TCP", 0, "0", "1", func(t *testing.T, n int) (out string) {
		assault(t, zones{zoneAt("leaf.lab.", victim1, "www A 198.51.100.1")}, nil, func(l *lab) {
			l.behave(victim1, siminternet.Behaviour{Forge: make([]siminternet.Forgery, n)}) // ForgeWrongID
			l.want("www.leaf.lab.", dns.TypeA, "NOERROR | www.leaf.lab. A 198.51.100.1")
			out = some(l.sim.Count(func(e siminternet.LogEntry) bool { return e.Transport == siminternet.TCP }))
		})
		return out
	}},
	{"TuDoor: replies that show a server to be without EDNS", "replies; whether it is believed", 1, "false", "true", func(t *testing.T, n int) string {
		return lacking(selection.LackEDNS, n, 0)
	}},
	{"TuDoor: EDNS is given up at servers", "replies FORMERR without OPT; later questions without EDNS", 1, "false", "true", func(t *testing.T, n int) string {
		return onRecursor(t, zones{zoneAt("leaf.lab.", victim1, "* A 198.51.100.1")}, nil, nil, func(r *recursor) string {
			r.sim.SetBehaviour(netip.MustParseAddr(victim1), siminternet.Behaviour{EDNS: siminternet.EDNSFormErr})
			for i := range n {
				r.resolve(fmt.Sprintf("w%d.leaf.lab.", i), dns.TypeA)
			}
			r.sim.SetBehaviour(netip.MustParseAddr(victim1), siminternet.Behaviour{})
			r.sim.ResetLog()
			r.resolve("later.leaf.lab.", dns.TypeA)
			return fmt.Sprint(r.sim.Count(func(e siminternet.LogEntry) bool { return !e.EDNS }) > 0)
		})
	}},
	{"0x20: a server that loses the case is remembered for", "minutes, and half a one; whether it is", 59, "true", "false", func(t *testing.T, n int) string {
		return lacking(selection.LackCase, 1, time.Duration(n)*time.Minute+30*time.Second)
	}},
	{"fragments: bytes that are taken over UDP", "bytes of a response over UDP", 1232, "NOERROR | www.size.lab. A 198.51.100.1, 0 over TCP", "NOERROR | www.size.lab. A 198.51.100.2, 1 over TCP", sized},
	{"fragments: bytes that are offered", "bytes; whether a query offered so many", 1232, "true", "false", func(t *testing.T, n int) string {
		return onRecursor(t, nil, nil, nil, func(r *recursor) string {
			r.resolve("www.ecdsa.com.", dns.TypeA)
			return fmt.Sprint(r.sim.Count(func(e siminternet.LogEntry) bool { return int(e.UDPSize) >= n }) > 0)
		})
	}},
	{"large RRsets: records of an RRset", "records", 256, "read", "malformed", func(t *testing.T, n int) string { return message(n) }},
	{"large RRsets: bytes of a settled answer that is kept whole", "bytes", query.MaxEntry, "kept: true", "kept: false", func(t *testing.T, n int) string { return entry(n) }},
}
