package limits

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path"
	"strconv"
	"strings"
)

// ReadMachine finds out what this process may use: the least of what the machine
// has and what every control group around the process allows. root is the root
// of the file system, os.DirFS("/") but for tests.
//
// A file that is missing or says "max" allows everything. It is an error if not
// even the memory or the processors of the machine can be read.
func ReadMachine(root fs.FS) (Machine, error) {
	memory, cpus := least{value: math.MaxInt64}, least{value: math.MaxInt64}

	if n, err := memTotal(root); err == nil {
		memory.take(n, "RAM")
	}
	if n, err := affinity(root); err == nil {
		cpus.take(n, "affinity")
	}
	v1, v2 := groups(root)
	for _, dir := range upwards("sys/fs/cgroup", v2) {
		memory.takeFile(root, path.Join(dir, "memory.max"), "cgroup v2 memory.max")
		memory.takeFile(root, path.Join(dir, "memory.high"), "cgroup v2 memory.high")
		if text, err := fs.ReadFile(root, path.Join(dir, "cpu.max")); err == nil {
			if f := strings.Fields(string(text)); len(f) == 2 {
				cpus.takeQuota(f[0], f[1], "cgroup v2 cpu.max")
			}
		}
	}
	for _, dir := range upwards("sys/fs/cgroup/memory", v1["memory"]) {
		memory.takeFile(root, path.Join(dir, "memory.limit_in_bytes"), "cgroup v1 memory.limit_in_bytes")
	}
	for _, dir := range upwards("sys/fs/cgroup/cpu", v1["cpu"]) {
		quota, err := fs.ReadFile(root, path.Join(dir, "cpu.cfs_quota_us"))
		period, err2 := fs.ReadFile(root, path.Join(dir, "cpu.cfs_period_us"))
		if err == nil && err2 == nil {
			cpus.takeQuota(string(quota), string(period), "cgroup v1 cpu.cfs_quota_us")
		}
	}
	switch {
	case memory.from == "":
		return Machine{}, errors.New("the memory of this machine cannot be read from /proc/meminfo or a control group")
	case cpus.from == "":
		return Machine{}, errors.New("the processors of this process cannot be read from /proc/self/status or a control group")
	}
	return Machine{Memory: memory.value, MemoryFrom: memory.from, CPUs: int(min(cpus.value, math.MaxInt32)), CPUsFrom: cpus.from}, nil
}

// A least remembers the smallest value it was shown, and who said so.
type least struct {
	value int64
	from  string
}

func (l *least) take(n int64, from string) {
	if n > 0 && n < l.value {
		l.value, l.from = n, from
	}
}

// takeFile takes the number in a file. Without a limit, version 1 holds the
// largest multiple of a page and version 2 the word max.
func (l *least) takeFile(root fs.FS, name, from string) {
	const noLimit = 1 << 60
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return
	}
	if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && n < noLimit {
		l.take(n, from)
	}
}

// takeQuota takes microseconds of processor time a period as whole processors,
// rounded up.
func (l *least) takeQuota(quota, period, from string) {
	q, err := strconv.ParseInt(strings.TrimSpace(quota), 10, 64)
	p, err2 := strconv.ParseInt(strings.TrimSpace(period), 10, 64)
	if err == nil && err2 == nil && q > 0 && p > 0 {
		l.take((q-1)/p+1, from)
	}
}

func memTotal(root fs.FS) (int64, error) {
	text, err := field(root, "proc/meminfo", "MemTotal:")
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(text, "kB")), 10, 64)
	if err != nil || n < 0 || n > math.MaxInt64/kib {
		return 0, fmt.Errorf("/proc/meminfo: MemTotal is %q", text)
	}
	return n * kib, nil
}

// affinity counts the processors that this process may run on: "0-3,8".
func affinity(root fs.FS) (int64, error) {
	text, err := field(root, "proc/self/status", "Cpus_allowed_list:")
	if err != nil {
		return 0, err
	}
	var count int64
	for part := range strings.SplitSeq(text, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		a, err := strconv.ParseInt(strings.TrimSpace(first), 10, 32)
		b, err2 := strconv.ParseInt(strings.TrimSpace(last), 10, 32)
		if err != nil || err2 != nil || a < 0 || b < a {
			return 0, fmt.Errorf("/proc/self/status: Cpus_allowed_list is %q", text)
		}
		count += b - a + 1
	}
	return count, nil
}

// field returns what follows name on its line.
func field(root fs.FS, file, name string) (string, error) {
	f, err := root.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), name); ok {
			return strings.TrimSpace(rest), nil
		}
	}
	if err := lines.Err(); err != nil {
		return "", err
	}
	return "", fmt.Errorf("/%s has no %s", file, name)
}

// groups returns the control groups of this process: by controller of version
// 1, and the one of version 2. Where the file cannot be read both are the root.
func groups(root fs.FS) (v1 map[string]string, v2 string) {
	v1 = map[string]string{}
	text, _ := fs.ReadFile(root, "proc/self/cgroup")
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(parts) != 3:
		case parts[0] == "0" && parts[1] == "":
			v2 = parts[2]
		default:
			for controller := range strings.SplitSeq(parts[1], ",") {
				v1[controller] = parts[2]
			}
		}
	}
	return v1, v2
}

// upwards lists the folders from the group up to the mount point. Inside a
// container the group may be named as the host sees it and not exist here; then
// the mount point is the group.
func upwards(mount, group string) []string {
	var dirs []string
	for g := path.Clean("/" + group); g != "/"; g = path.Dir(g) {
		dirs = append(dirs, path.Join(mount, g))
	}
	return append(dirs, mount)
}
