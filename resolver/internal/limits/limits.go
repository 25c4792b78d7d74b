// Package limits is the one place that knows what a Raspberry Pi is: it turns
// the memory and the processors of a machine into one table of sizes, counts
// and rates.
//
// For makes the table. Its input is a Machine, as ReadMachine finds it, and
// Options: a hardware class and limits that somebody set. A class such as "8g"
// makes the table of a machine with 8 GiB; "auto", the default, that of this
// machine. Live holds a table that can be changed while the resolver runs.
//
// Memory adds up. What the process may use is the memory of the machine less a
// reserve for the kernel and others; from it the parts outside the Go heap
// (cache, users, filter, buffers) are taken, and what is left is GOMEMLIMIT.
// The heap must hold every connection, query and handshake that the table
// allows at once, with a quarter to spare for the garbage collector. A class, or
// a limit, that breaks this is refused with both numbers: settings tuned for one
// machine must not be carried to a smaller one in silence.
//
// Values are int64 in the unit of their row: bytes, or a count. Errors are
// *Error and name the limit. The package reads no clock and starts nothing.
package limits

import (
	"fmt"
	"strconv"
	"strings"
)

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30
)

// A Machine is what there is to share out.
type Machine struct {
	Memory     int64 // bytes
	MemoryFrom string
	CPUs       int
	CPUsFrom   string
}

// Options say what the operator wants. The zero Options mean the class "auto".
type Options struct {
	Class string // "auto" or "" for this machine; else "512m", "2g", "8g", …

	// Workers is the number of serving workers. Zero means one per processor.
	Workers int

	// Set holds limits that replace those of the class. Only names that Settable
	// accepts may be in it.
	Set map[Name]int64

	// SetFrom says who set a limit, for the table. Nil means the configuration.
	SetFrom map[Name]string
}

// A Name is one row of the table.
type Name uint8

// The rows, in the order of the table.
const (
	Memory                Name = iota // bytes the process may use in all
	Cache                             // bytes of all DNS caches, outside the Go heap
	Users                             // bytes of user records, outside the Go heap
	Filter                            // bytes of compiled lists, outside the Go heap
	Buffers                           // bytes of packet and socket buffers
	GoMemLimit                        // GOMEMLIMIT
	Workers                           // serving workers
	GoMaxProcs                        // GOMAXPROCS
	TCPConnections                    // of clients at once, plain TCP
	DoTConnections                    // the same, DoT
	DoHConnections                    // the same, DoH over TCP and QUIC
	DoQConnections                    // the same, DoQ
	ConnectionsPerSource              // of one source, over all of these transports
	Pipelining                        // unanswered queries of one connection
	InFlight                          // queries being resolved at once
	Handshakes                        // TLS and QUIC handshakes in progress
	ClientRate                        // answers a second to one stranger's network over UDP
	ClientOutstanding                 // unanswered queries of one stranger's address
	TreeQueries                       // upstream queries for one client query
	TreeFailedValidations             // failed signature checks for one client query
	SyncBuffer                        // bytes of a transfer of user data held at once
	SyncGroup                         // changes persisted together

	rows // number of rows
)

// A Row is one limit: what it is, and why it is so.
type Row struct {
	Name  string `json:"name"`
	Value int64  `json:"value"`
	Unit  string `json:"unit"` // "bytes", or what is counted
	From  string `json:"from"`
}

// A Table holds every limit of one machine. It is a value and never changes.
type Table struct {
	rows [rows]Row
}

// Value returns one limit.
func (t *Table) Value(n Name) int64 { return t.rows[n].Value }

// Row returns one limit with its reason.
func (t *Table) Row(n Name) Row { return t.rows[n] }

// Rows returns all limits in a fixed order.
func (t *Table) Rows() []Row { return append([]Row(nil), t.rows[:]...) }

// An Error is a class or a limit that cannot be.
type Error struct {
	Name string // "class", or the name of the limit
	What string
	Try  string
}

func (e *Error) Error() string { return fmt.Sprintf("limit %s: %s; try: %s", e.Name, e.What, e.Try) }

// For makes the table for a machine.
func For(m Machine, o Options) (Table, error) {
	var t Table
	if m.CPUs < 1 {
		return t, &Error{"class", fmt.Sprintf("the machine has %d processors", m.CPUs), "1 or more"}
	}
	if m.Memory < LeastMemory {
		return t, &Error{"memory", fmt.Sprintf("the machine has %s (%s), and Sluice needs %s", Size(m.Memory), m.MemoryFrom, Size(LeastMemory)), "more memory"}
	}
	if o.Workers < 0 || o.Workers > MostWorkers {
		return t, &Error{"workers", fmt.Sprintf("%d workers", o.Workers), fmt.Sprintf("1 to %d, or 0 for one per processor", MostWorkers)}
	}
	m.Memory = min(m.Memory, mostMemory)
	nominal, why, err := class(m, o.Class)
	if err != nil {
		return t, err
	}
	for n, v := range o.Set {
		if err := settable(n, v); err != nil {
			return t, err
		}
	}
	b := builder{t: &t, o: o}
	if err := b.memory(m, nominal, why); err != nil {
		return t, err
	}
	b.workers(m)
	b.work(nominal, why)
	return t, b.fits()
}

// Memory and workers below and above which nothing sensible can be said.
const (
	LeastMemory = 256 * mib
	MostWorkers = 1024

	mostMemory = 1 << 50 // far from overflow in what follows
)

// Classes are the classes that are tested and worth naming; any whole number of
// GiB, or of MiB, is a class too.
func Classes() []string {
	return []string{"512m", "1g", "2g", "4g", "8g", "16g", "32g", "64g", "128g", "256g", "512g", "1024g"}
}

// class returns the memory that the table is made for.
func class(m Machine, name string) (nominal int64, why string, err error) {
	if name == "" || name == "auto" {
		return m.Memory, fmt.Sprintf("auto: %s, %s", Size(m.Memory), m.MemoryFrom), nil
	}
	nominal, err = classMemory(name)
	if err != nil {
		return 0, "", err
	}
	// A machine sold as 8 GiB shows an eighth less once firmware and kernel have
	// taken theirs.
	if m.Memory < nominal-nominal/8 {
		return 0, "", &Error{"class", fmt.Sprintf("the class %s is for %s, and the machine has %s (%s)", name, Size(nominal), Size(m.Memory), m.MemoryFrom), "auto, or a smaller class"}
	}
	return nominal, "class " + name, nil
}

func classMemory(name string) (int64, error) {
	bad := &Error{"class", fmt.Sprintf("%q is not a class", name), "auto, " + strings.Join(Classes(), ", ")}
	if len(name) < 2 || name[0] < '1' || name[0] > '9' {
		return 0, bad
	}
	n, err := strconv.ParseInt(name[:len(name)-1], 10, 32)
	unit := map[byte]int64{'m': mib, 'g': gib}[name[len(name)-1]]
	if err != nil || unit == 0 || n*unit < LeastMemory {
		return 0, bad
	}
	return n * unit, nil
}

// A builder fills one table from the top.
type builder struct {
	t *Table
	o Options
}

// put enters a row: what was set, or else what the class says.
func (b *builder) put(n Name, value int64, from string) {
	if v, ok := b.o.Set[n]; ok {
		value, from = v, "configuration"
		if by := b.o.SetFrom[n]; by != "" {
			from = by
		}
	}
	b.t.rows[n] = Row{Name: spec[n].name, Value: value, Unit: spec[n].unit, From: from}
}

// memory shares out the memory. Shares are in sixteenths of what the process may
// use: 4 cache, 3 users, 1 filter, 1 buffers, 7 the Go heap.
func (b *builder) memory(m Machine, nominal int64, why string) error {
	have := min(nominal, m.Memory)
	reserve := min(max(have/8, 64*mib), 8*gib)
	b.put(Memory, have-reserve, fmt.Sprintf("%s, less %s for the system", why, Size(reserve)))
	total := b.t.Value(Memory)
	if total > m.Memory {
		return &Error{"memory", fmt.Sprintf("%s is more than the %s of the machine (%s)", Size(total), Size(m.Memory), m.MemoryFrom), "less, or leave it out"}
	}
	sixteenth := total / 16
	b.put(Cache, 4*sixteenth, "4/16 of memory")
	b.put(Users, 3*sixteenth, "3/16 of memory")
	b.put(Filter, sixteenth, "1/16 of memory")
	b.put(Buffers, sixteenth, "1/16 of memory")
	arenas := b.t.Value(Cache) + b.t.Value(Users) + b.t.Value(Filter) + b.t.Value(Buffers)
	heap := total - arenas
	if heap < 3*sixteenth {
		return &Error{"cache", fmt.Sprintf("%s leaves too little of the memory of %s for everything else", Size(b.t.Value(Cache)), Size(total)), Size(8*sixteenth) + " or less"}
	}
	b.put(GoMemLimit, heap, "memory less cache, users, filter and buffers")
	return nil
}

// What one of each costs on the Go heap, goroutine, buffers and library state
// included: estimates on the high side.
const (
	costTCP       = 10 * kib
	costDoT       = 40 * kib
	costDoH       = 64 * kib
	costDoQ       = 64 * kib
	costQuery     = 16 * kib
	costHandshake = 96 * kib
	costRuntime   = 32 * mib // what a process costs that does nothing
)

// How many of each a GiB of memory allows. With 2 GiB there are 4,096 TCP
// connections.
const (
	tcpPerGiB       = 2048
	dotPerGiB       = 2048
	dohPerGiB       = 768
	doqPerGiB       = 512
	queriesPerGiB   = 2048
	handshakeShare  = 16 // of DoT connections
	handshakePerCPU = 64
	heapPerGiB      = tcpPerGiB*costTCP + dotPerGiB*(costDoT+costHandshake/handshakeShare) + dohPerGiB*costDoH +
		doqPerGiB*costDoQ + queriesPerGiB*costQuery
)

func (b *builder) workers(m Machine) {
	workers, from := int64(m.CPUs), fmt.Sprintf("processors: %d, %s", m.CPUs, m.CPUsFrom)
	if b.o.Workers > 0 {
		workers, from = int64(b.o.Workers), "configuration"
	}
	workers = min(workers, MostWorkers)
	b.put(Workers, workers, from)
	// The spare Ps serve the netpoller, which busy workers starve.
	b.put(GoMaxProcs, workers+max(1, workers/4), "workers and a quarter more")
}

// work sets what follows from memory and processors together.
func (b *builder) work(nominal int64, why string) {
	const fixed = "default"
	t := b.t
	b.put(SyncBuffer, min(max(t.Value(Memory)/128, 2*mib), 64*mib), "1/128 of memory, 2 MiB to 64 MiB")
	b.put(SyncGroup, 500, fixed)

	// On a small machine, or beside a cache that was set large, the heap allows
	// less than the class.
	if held := max(t.room()-t.Value(SyncBuffer), 0) / (heapPerGiB / 1024) * mib; held < nominal {
		nominal, why = held, "what the Go heap holds"
	}
	perGiB := func(count, least, most int64) int64 {
		return min(max(nominal/mib*count/1024, least), most)
	}
	// The caps keep all transports together below a million file descriptors.
	b.put(TCPConnections, perGiB(tcpPerGiB, 64, 256<<10), why)
	b.put(DoTConnections, perGiB(dotPerGiB, 64, 256<<10), why)
	b.put(DoHConnections, perGiB(dohPerGiB, 32, 128<<10), why)
	b.put(DoQConnections, perGiB(doqPerGiB, 32, 64<<10), why)
	b.put(ConnectionsPerSource, max(4, t.Value(TCPConnections)/64), "1/64 of tcp_connections")
	b.put(Pipelining, perGiB(32, 8, 64), why)
	b.put(InFlight, perGiB(queriesPerGiB, 256, 256<<10), why)
	b.put(Handshakes, min(handshakePerCPU*t.Value(Workers), max(t.Value(DoTConnections)/handshakeShare, 1)),
		fmt.Sprintf("%d a worker, at most 1/%d of dot_connections", handshakePerCPU, handshakeShare))

	b.put(ClientRate, 100, fixed)
	b.put(ClientOutstanding, 200, fixed)
	b.put(TreeQueries, 100, fixed)
	b.put(TreeFailedValidations, 8, fixed)
}

// fits checks that the heap holds all that the table lets in.
func (b *builder) fits() error {
	t := b.t
	need, room := t.heapNeed(), t.room()
	if need <= room {
		return nil
	}
	// Name a limit that was set, since that is what can be changed: the one that
	// costs most, else what made the heap small.
	name, most := "memory", int64(0)
	if _, set := b.o.Set[Cache]; set {
		name = "cache"
	}
	for n := range rows {
		if _, set := b.o.Set[n]; set && t.heapCost(n) > most {
			name, most = spec[n].name, t.heapCost(n)
		}
	}
	return &Error{name, fmt.Sprintf("the connections, queries and handshakes that are allowed at once need %s of Go heap, and there are %s", Size(need), Size(room)), "lower limits, or more memory"}
}

// room is how much of the Go heap may be live at once: less what the process
// needs for itself, and a quarter to spare for the garbage collector.
func (t *Table) room() int64 { return max(t.Value(GoMemLimit)-costRuntime, 0) / 4 * 3 }

// heapCost is what the row lets onto the Go heap.
func (t *Table) heapCost(n Name) int64 {
	v := t.Value(n)
	switch n {
	case TCPConnections:
		return v * costTCP
	case DoTConnections:
		return v * costDoT
	case DoHConnections:
		return v * costDoH
	case DoQConnections:
		return v * costDoQ
	case InFlight:
		return v * costQuery
	case Handshakes:
		return v * costHandshake
	case SyncBuffer:
		return v
	}
	return 0
}

func (t *Table) heapNeed() int64 {
	var sum int64
	for n := range rows {
		sum += t.heapCost(n)
	}
	return sum
}

// spec is what is known of each row beforehand. A row with a most can be set.
var spec = [rows]struct {
	name, unit  string
	least, most int64
}{
	Memory:                {"memory", "bytes", LeastMemory / 2, mostMemory},
	Cache:                 {"cache", "bytes", mib, mostMemory},
	Users:                 {"users", "bytes", 0, 0},
	Filter:                {"filter", "bytes", 0, 0},
	Buffers:               {"buffers", "bytes", 0, 0},
	GoMemLimit:            {"gomemlimit", "bytes", 0, 0},
	Workers:               {"workers", "workers", 0, 0},
	GoMaxProcs:            {"gomaxprocs", "processors", 0, 0},
	TCPConnections:        {"tcp_connections", "connections", 1, 1 << 20},
	DoTConnections:        {"dot_connections", "connections", 1, 1 << 20},
	DoHConnections:        {"doh_connections", "connections", 1, 1 << 20},
	DoQConnections:        {"doq_connections", "connections", 1, 1 << 20},
	ConnectionsPerSource:  {"connections_per_source", "connections", 1, 1 << 20},
	Pipelining:            {"pipelining", "queries", 1, 64},
	InFlight:              {"in_flight", "queries", 1, 1 << 20},
	Handshakes:            {"handshakes", "handshakes", 1, 1 << 16},
	ClientRate:            {"client_rate", "answers/s", 1, 1 << 20},
	ClientOutstanding:     {"client_outstanding", "queries", 1, 1 << 20},
	TreeQueries:           {"tree_queries", "queries", 1, 1000},
	TreeFailedValidations: {"tree_failed_validations", "validations", 1, 64},
	SyncBuffer:            {"sync_buffer", "bytes", 0, 0},
	SyncGroup:             {"sync_group", "changes", 0, 0},
}

// String is the name that operators use.
func (n Name) String() string {
	if n >= rows {
		return fmt.Sprintf("limit %d", uint8(n))
	}
	return spec[n].name
}

// Settable reports whether a configuration or an operator may set n.
func (n Name) Settable() bool { return n < rows && spec[n].most > 0 }

// ByName finds the row that operators call s.
func ByName(s string) (Name, bool) {
	for n := range rows {
		if spec[n].name == s {
			return n, true
		}
	}
	return 0, false
}

// Names returns the names that can be set, in the order of the table.
func Names() []Name {
	var out []Name
	for n := range rows {
		if n.Settable() {
			out = append(out, n)
		}
	}
	return out
}

// Unit is what the values of n count.
func (n Name) Unit() string { return spec[n].unit }

func settable(n Name, v int64) error {
	if !n.Settable() {
		return &Error{n.String(), "follows from the others and cannot be set", "another limit"}
	}
	s := spec[n]
	if v < s.least || v > s.most {
		if s.unit == "bytes" {
			return &Error{s.name, fmt.Sprintf("%s is out of bounds", Size(v)), fmt.Sprintf("%s or more", Size(s.least))}
		}
		return &Error{s.name, fmt.Sprintf("%d is out of bounds", v), fmt.Sprintf("a number from %d to %d", s.least, s.most)}
	}
	return nil
}

// Size writes bytes for people: "1.8 GiB", "448 MiB".
func Size(n int64) string {
	for _, u := range []struct {
		size int64
		name string
	}{{gib, "GiB"}, {mib, "MiB"}, {kib, "KiB"}} {
		if n >= u.size {
			s := strconv.FormatFloat(float64(n)/float64(u.size), 'f', 1, 64)
			return strings.TrimSuffix(s, ".0") + " " + u.name
		}
	}
	return fmt.Sprintf("%d B", n)
}
