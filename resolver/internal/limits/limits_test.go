package limits

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
)

// checkTable holds what must be true of every table, on every machine.
func checkTable(t *testing.T, m Machine, table Table) {
	t.Helper()
	v := table.Value
	if v(Memory) > m.Memory {
		t.Errorf("memory %s of %s", Size(v(Memory)), Size(m.Memory))
	}
	if sum := v(Cache) + v(Users) + v(Filter) + v(Buffers) + v(GoMemLimit); sum > v(Memory) {
		t.Errorf("the parts are %s, the whole is %s", Size(sum), Size(v(Memory)))
	}
	heap := v(TCPConnections)*costTCP + v(DoTConnections)*costDoT + v(DoHConnections)*costDoH + v(DoQConnections)*costDoQ +
		v(InFlight)*costQuery + v(Handshakes)*costHandshake + v(SyncBuffer)
	if heap > (v(GoMemLimit)-costRuntime)/4*3 {
		t.Errorf("all that may be on the heap is %s of %s", Size(heap), Size(v(GoMemLimit)))
	}
	if got, want := v(GoMaxProcs), v(Workers)+max(1, v(Workers)/4); got != want {
		t.Errorf("gomaxprocs %d, want %d", got, want)
	}
	if p := v(Pipelining); p < 1 || p > 64 {
		t.Errorf("pipelining %d", p)
	}
	if files := v(TCPConnections) + v(DoTConnections) + v(DoHConnections); files > 1<<20 {
		t.Errorf("%d connections are more than a process may have files", files)
	}
	for _, r := range table.Rows() {
		if r.Value <= 0 || r.Name == "" || r.Unit == "" || r.From == "" {
			t.Errorf("incomplete row %+v", r)
		}
	}
}

func TestEveryClassFitsItsMachine(t *testing.T) {
	for _, name := range Classes() {
		nominal, err := classMemory(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, memory := range []int64{nominal, nominal - nominal/8, nominal + nominal/3, 4 * nominal} {
			for _, cpus := range []int{1, 2, 3, 16, 256, 5000} {
				m := Machine{memory, "RAM", cpus, "affinity"}
				table, err := For(m, Options{Class: name})
				if err != nil {
					t.Fatalf("%s on %s: %v", name, Size(memory), err)
				}
				checkTable(t, m, table)
				if t.Failed() {
					t.Fatalf("class %s, %s, %d CPUs: %+v", name, Size(memory), cpus, table.Rows())
				}
			}
		}
		if _, err := For(Machine{nominal - nominal/8 - 1, "RAM", 4, "affinity"}, Options{Class: name}); err == nil {
			t.Errorf("class %s was accepted by a machine much too small for it", name)
		}
	}
}

func TestOddMachinesFit(t *testing.T) {
	var last Table
	for memory := int64(LeastMemory); memory < 3<<40; memory += memory/17 + 4095 {
		for _, cpus := range []int{1, 4, 256} {
			m := Machine{memory, "RAM", cpus, "affinity"}
			table, err := For(m, Options{})
			if err != nil {
				t.Fatalf("%s, %d CPUs: %v", Size(memory), cpus, err)
			}
			checkTable(t, m, table)
			if t.Failed() {
				t.Fatalf("%s, %d CPUs: %+v", Size(memory), cpus, table.Rows())
			}
			if cpus == 4 {
				// More memory never means less of anything.
				for n := range rows {
					if table.Value(n) < last.Value(n) {
						t.Fatalf("%s at %s: %d after %d", n, Size(memory), table.Value(n), last.Value(n))
					}
				}
				last = table
			}
		}
	}
}

func TestKnownNumbers(t *testing.T) {
	for _, tt := range []struct {
		machine Machine
		class   string
		want    map[Name]int64
	}{
		{Machine{480 * mib, "RAM", 1, "affinity"}, "auto", map[Name]int64{ // a small Raspberry Pi
			Memory: 416 * mib, Cache: 104 * mib, Workers: 1, GoMaxProcs: 2, Pipelining: 15,
		}},
		{Machine{32 * gib, "RAM", 16, "affinity"}, "2g", map[Name]int64{
			TCPConnections: 4096, ConnectionsPerSource: 64, Pipelining: 64, Workers: 16, GoMaxProcs: 20, Handshakes: 256,
			ClientRate: 100, ClientOutstanding: 200, TreeQueries: 100, TreeFailedValidations: 8,
		}},
		{Machine{32 * gib, "RAM", 2, "affinity"}, "auto", map[Name]int64{
			Memory: 28 * gib, Cache: 7 * gib, TCPConnections: 65536, ConnectionsPerSource: 1024, Handshakes: 128, GoMaxProcs: 3,
		}},
		{Machine{1 << 40, "RAM", 256, "affinity"}, "auto", map[Name]int64{
			Memory: 1016 * gib, TCPConnections: 256 << 10, GoMaxProcs: 320,
		}},
	} {
		table, err := For(tt.machine, Options{Class: tt.class})
		if err != nil {
			t.Fatal(err)
		}
		for n, want := range tt.want {
			if got := table.Value(n); got != want {
				t.Errorf("%s on %s: %s = %d, want %d", tt.class, Size(tt.machine.Memory), n, got, want)
			}
		}
	}
}

func TestRefusals(t *testing.T) {
	m := Machine{8 * gib, "cgroup v2 memory.max", 4, "affinity"}
	for _, tt := range []struct {
		name string
		m    Machine
		o    Options
		key  string
		says []string
	}{
		{"class beyond the machine", m, Options{Class: "64g"}, "class", []string{"64 GiB", "8 GiB", "cgroup v2 memory.max"}},
		{"no class", m, Options{Class: "7q"}, "class", []string{`"7q"`}},
		{"sign", m, Options{Class: "+7g"}, "class", nil},
		{"tiny class", m, Options{Class: "1m"}, "class", nil},
		{"letter alone", m, Options{Class: "g"}, "class", nil},
		{"tiny machine", Machine{100 * mib, "RAM", 1, ""}, Options{}, "memory", []string{"100 MiB", "256 MiB"}},
		{"no processor", Machine{8 * gib, "RAM", 0, ""}, Options{}, "class", nil},
		{"memory beyond the machine", m, Options{Set: map[Name]int64{Memory: 9 * gib}}, "memory", []string{"9 GiB", "8 GiB"}},
		{"cache as large as everything", m, Options{Set: map[Name]int64{Cache: 7 * gib}}, "cache", []string{"7 GiB"}},
		{"connections of another machine", m, Options{Set: map[Name]int64{DoTConnections: 500_000, TCPConnections: 20_000}}, "dot_connections", []string{"Go heap"}},
		{"pipelining", m, Options{Set: map[Name]int64{Pipelining: 65}}, "pipelining", []string{"65"}},
		{"zero", m, Options{Set: map[Name]int64{InFlight: 0}}, "in_flight", nil},
		{"derived", m, Options{Set: map[Name]int64{GoMemLimit: gib}}, "gomemlimit", nil},
		{"unknown", m, Options{Set: map[Name]int64{rows + 3: 1}}, "limit", nil},
		{"workers", m, Options{Workers: MostWorkers + 1}, "workers", nil},
	} {
		_, err := For(tt.m, tt.o)
		var e *Error
		if !errors.As(err, &e) {
			t.Errorf("%s: error %v, want an *Error", tt.name, err)
			continue
		}
		if !strings.HasPrefix(e.Name, tt.key) || e.Try == "" {
			t.Errorf("%s: %q tries %q, want it to name %s", tt.name, e.Name, e.Try, tt.key)
		}
		for _, s := range tt.says {
			if !strings.Contains(e.Error(), s) {
				t.Errorf("%s: %q does not say %q", tt.name, e, s)
			}
		}
	}
}

func TestSetLimitsReplaceAndFollow(t *testing.T) {
	m := Machine{8 * gib, "RAM", 4, "affinity"}
	plain, err := For(m, Options{})
	if err != nil {
		t.Fatal(err)
	}
	table, err := For(m, Options{Workers: 2, Set: map[Name]int64{TCPConnections: 6400, Cache: 3 * gib}})
	if err != nil {
		t.Fatal(err)
	}
	checkTable(t, m, table)
	if r := table.Row(TCPConnections); r.Value != 6400 || r.From != "configuration" {
		t.Errorf("tcp_connections: %+v", r)
	}
	if r := table.Row(ConnectionsPerSource); r.Value != 100 || r.From != "1/64 of tcp_connections" {
		t.Errorf("connections_per_source: %+v", r)
	}
	if r := table.Row(Workers); r.Value != 2 || r.From != "configuration" {
		t.Errorf("workers: %+v", r)
	}
	if table.Value(DoTConnections) >= plain.Value(DoTConnections) || table.Row(DoTConnections).From != "what the Go heap holds" {
		t.Errorf("beside a larger cache: %+v; before %d", table.Row(DoTConnections), plain.Value(DoTConnections))
	}
}

func TestNames(t *testing.T) {
	want := strings.Fields(`memory cache tcp_connections dot_connections doh_connections doq_connections connections_per_source
		pipelining in_flight handshakes client_rate client_outstanding tree_queries tree_failed_validations`)
	var got []string
	for _, n := range Names() {
		got = append(got, n.String())
		if back, ok := ByName(n.String()); !ok || back != n {
			t.Errorf("ByName(%q) = %v, %v", n, back, ok)
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("names that can be set:\n%v, want\n%v", got, want)
	}
	if _, ok := ByName("pipelinig"); ok {
		t.Error("a name that does not exist was found")
	}
}

func TestLive(t *testing.T) {
	m := Machine{8 * gib, "RAM", 4, "affinity"}
	l, err := NewLive(m, Options{Set: map[Name]int64{Pipelining: 5}})
	if err != nil {
		t.Fatal(err)
	}
	wall := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	at := func(d time.Duration) Now { return Now{clock.Instant(0).Add(d), wall.Add(d)} }

	e, err := l.Set(Pipelining, 1, 30*time.Minute, "latency in Frankfurt", at(0))
	if err != nil || e.Old != 5 || e.New != 1 || l.Value(Pipelining) != 1 {
		t.Fatalf("set: %+v, %v, value %d", e, err, l.Value(Pipelining))
	}
	if tab := l.Table(); tab.Row(Pipelining).From != "set live: latency in Frankfurt" {
		t.Errorf("from: %q", tab.Row(Pipelining).From)
	}
	// What follows follows, and a change for good has no end.
	if _, err := l.Set(TCPConnections, 640, 0, "", at(time.Minute)); err != nil || l.Value(ConnectionsPerSource) != 10 {
		t.Fatalf("tcp_connections: %v, per source %d", err, l.Value(ConnectionsPerSource))
	}
	for name, fails := range map[string]func() error{
		"out of bounds":  func() error { _, err := l.Set(Pipelining, 65, 0, "", at(0)); return err },
		"does not fit":   func() error { _, err := l.Set(Cache, 7*gib, 0, "", at(0)); return err },
		"beyond machine": func() error { _, err := l.Set(Memory, 9*gib, 0, "", at(0)); return err },
		"derived":        func() error { _, err := l.Set(Workers, 9, 0, "", at(0)); return err },
		"negative time":  func() error { _, err := l.Set(Pipelining, 3, -1, "", at(0)); return err },
		"reset derived":  func() error { _, err := l.Reset(Workers, "", at(0)); return err },
	} {
		before := l.Table()
		if err := fails(); err == nil || l.Table() != before {
			t.Errorf("%s: error %v, or the table changed", name, err)
		}
	}
	if got := l.Expire(at(30*time.Minute - 1)); got != nil || l.Value(Pipelining) != 1 {
		t.Errorf("expired early: %+v", got)
	}
	got := l.Expire(at(30 * time.Minute))
	if len(got) != 1 || got[0].Name != "pipelining" || !got[0].Expired || got[0].Old != 1 || got[0].New != 5 || l.Value(Pipelining) != 5 {
		t.Errorf("expiry: %+v, value %d; want the configured 5 back", got, l.Value(Pipelining))
	}
	if l.Value(TCPConnections) != 640 {
		t.Errorf("a change for good ended: %d", l.Value(TCPConnections))
	}
	if e, err := l.Reset(TCPConnections, "over", at(time.Hour)); err != nil || e.New != 16384 || l.Value(ConnectionsPerSource) != 256 {
		t.Errorf("reset: %+v, %v", e, err)
	}
	if audit := l.Audit(); len(audit) != 4 || audit[0].Why != "latency in Frankfurt" || audit[0].At != wall || !audit[3].Reverted {
		t.Errorf("audit: %+v", audit)
	}
	for i := range 2 * auditSize {
		if _, err := l.Set(Pipelining, int64(i%64+1), 0, "", at(0)); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(l.Audit()); n != auditSize {
		t.Errorf("%d audit entries are kept, want %d", n, auditSize)
	}
}

// A change that only fits beside another ends with it, instead of leaving a table
// that does not add up.
func TestLiveDependentChangesEndTogether(t *testing.T) {
	m := Machine{8 * gib, "RAM", 4, "affinity"}
	l, err := NewLive(m, Options{Set: map[Name]int64{Memory: 2 * gib}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Set(Cache, 2*gib, 0, "", Now{}); err == nil {
		t.Fatal("a cache as large as the memory was accepted")
	}
	if _, err := l.Set(Memory, 6*gib, time.Minute, "", Now{}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Set(Cache, 2*gib, 0, "", Now{}); err != nil {
		t.Fatal(err)
	}
	ended := l.Expire(Now{Elapsed: clock.Instant(0).Add(time.Hour)})
	if len(ended) != 2 || l.Value(Memory) != 2*gib || l.Value(Cache) >= 2*gib {
		t.Errorf("ended %+v; memory %s, cache %s", ended, Size(l.Value(Memory)), Size(l.Value(Cache)))
	}
	table := l.Table()
	checkTable(t, m, table)
}

func TestReadMachine(t *testing.T) {
	proc := map[string]string{
		"proc/meminfo":     "MemTotal:       24683620 kB\nMemFree: 1 kB\n",
		"proc/self/status": "Name:\tx\nCpus_allowed_list:\t0-3,8,10-11\n",
	}
	const ram, group = 24683620 * kib, "/system.slice/sluice.service"
	for _, tt := range []struct {
		name  string
		files map[string]string
		want  Machine
	}{
		{"bare", nil, Machine{ram, "RAM", 7, "affinity"}},
		{"v2, own group", map[string]string{
			"proc/self/cgroup":                          "0::" + group + "\n",
			"sys/fs/cgroup" + group + "/memory.max":     "2147483648\n",
			"sys/fs/cgroup/system.slice/memory.max":     "max\n",
			"sys/fs/cgroup" + group + "/cpu.max":        "150000 100000\n",
			"sys/fs/cgroup" + group + "/memory.current": "5\n",
		}, Machine{2 * gib, "cgroup v2 memory.max", 2, "cgroup v2 cpu.max"}},
		{"v2, the group around is smaller", map[string]string{
			"proc/self/cgroup":                      "0::" + group + "\n",
			"sys/fs/cgroup" + group + "/memory.max": "2147483648\n",
			"sys/fs/cgroup/system.slice/memory.max": "1073741824\n",
			"sys/fs/cgroup/system.slice/cpu.max":    "max 100000\n",
		}, Machine{gib, "cgroup v2 memory.max", 7, "affinity"}},
		{"v2, throttled below the maximum", map[string]string{
			"proc/self/cgroup":          "0::/\n",
			"sys/fs/cgroup/memory.max":  "4294967296\n",
			"sys/fs/cgroup/memory.high": "3221225472\n",
		}, Machine{3 * gib, "cgroup v2 memory.high", 7, "affinity"}},
		{"v2, container that sees the host's name", map[string]string{
			"proc/self/cgroup":         "0::/docker/0123456789abcdef\n",
			"sys/fs/cgroup/memory.max": "536870912\n",
		}, Machine{512 * mib, "cgroup v2 memory.max", 7, "affinity"}},
		{"v1", map[string]string{
			"proc/self/cgroup": "4:memory:/a/b\n3:cpu,cpuacct:/a\n0::/\n",
			"sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "1073741824\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes":     "9223372036854771712\n",
			"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us":           "100000\n",
			"sys/fs/cgroup/cpu/a/cpu.cfs_period_us":          "100000\n",
		}, Machine{gib, "cgroup v1 memory.limit_in_bytes", 1, "cgroup v1 cpu.cfs_quota_us"}},
		{"v1 without a limit", map[string]string{
			"proc/self/cgroup":                           "4:memory:/\n3:cpu:/\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
			"sys/fs/cgroup/cpu/cpu.cfs_quota_us":         "-1\n",
			"sys/fs/cgroup/cpu/cpu.cfs_period_us":        "100000\n",
		}, Machine{ram, "RAM", 7, "affinity"}},
		{"group above the RAM", map[string]string{
			"proc/self/cgroup":         "0::/\n",
			"sys/fs/cgroup/memory.max": "68719476736\n",
		}, Machine{ram, "RAM", 7, "affinity"}},
		{"nonsense", map[string]string{
			"proc/self/cgroup":         "0::/../..\n::\n4\nx:memory:/../../etc\n",
			"sys/fs/cgroup/memory.max": "lots\n",
			"sys/fs/cgroup/cpu.max":    "1\n",
		}, Machine{ram, "RAM", 7, "affinity"}},
	} {
		root := fstest.MapFS{}
		for _, files := range []map[string]string{proc, tt.files} {
			for name, text := range files {
				root[name] = &fstest.MapFile{Data: []byte(text)}
			}
		}
		got, err := ReadMachine(root)
		if err != nil || got != tt.want {
			t.Errorf("%s: %+v, %v; want %+v", tt.name, got, err, tt.want)
		}
	}
	for _, missing := range []string{"proc/meminfo", "proc/self/status"} {
		root := fstest.MapFS{}
		for name, text := range proc {
			if name != missing {
				root[name] = &fstest.MapFile{Data: []byte(text)}
			}
		}
		if m, err := ReadMachine(root); err == nil {
			t.Errorf("without %s: %+v, want an error", missing, m)
		}
	}
}

func FuzzReadMachine(f *testing.F) {
	f.Add("MemTotal: 1 kB", "Cpus_allowed_list: 0-3", "0::/a\n4:memory:/b", "max", "1 1")
	f.Fuzz(func(t *testing.T, meminfo, status, groups, memory, cpu string) {
		m, err := ReadMachine(fstest.MapFS{
			"proc/meminfo":             {Data: []byte(meminfo)},
			"proc/self/status":         {Data: []byte(status)},
			"proc/self/cgroup":         {Data: []byte(groups)},
			"sys/fs/cgroup/memory.max": {Data: []byte(memory)},
			"sys/fs/cgroup/cpu.max":    {Data: []byte(cpu)},
		})
		if err == nil && (m.Memory <= 0 || m.CPUs <= 0) {
			t.Fatalf("%+v", m)
		}
		if table, err := For(m, Options{}); err == nil {
			checkTable(t, m, table)
		}
	})
}
