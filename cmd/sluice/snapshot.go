package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-dns/sluice/usercache"
)

// exitDamaged says that a file is damaged.
const exitDamaged = 3

func snapshotCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "snapshot",
		Short: "Look at, check and salvage files of user data",
		Long: `Look at, check and salvage files of user data (DATA_DIR/users/KIND-NNNNNNNN.db).

A file is read page by page, in a process of its own with a limit on memory, and
is believed in nothing. It is never written. Take one that no resolver has open,
or a copy: a change under way looks like damage.

Exit status 0 if the file is whole, 3 if it is damaged.`,
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error { return usagef("say which: verify, inspect or repair") },
	}
	for _, x := range []struct{ verb, short string }{
		{"verify", "Say whether a file is whole, and if not, what is wrong where"},
		{"inspect", "Show what is in a file"},
		{"repair", "Copy the whole records of a file to FILE.repaired"},
	} {
		var asJSON bool
		s := &cobra.Command{
			Use:   x.verb + " [--json] FILE",
			Short: x.short,
			Args:  cobra.ExactArgs(1),
			RunE: func(c *cobra.Command, args []string) error {
				return snapshot(c, x.verb, args[0], asJSON)
			},
		}
		if x.verb == "repair" {
			s.Long = `Copy the whole records of a file to FILE.repaired, which must not exist. A
resolver that finds it in the place of FILE serves what is in it and fetches from
its service what is missing.

The exit status is about FILE: 0 if it was whole, 3 if it was damaged, whatever
could be salvaged; 1 if FILE.repaired could not be written.`
		}
		s.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
		c.AddCommand(s)
	}
	return c
}

// snapshot has a child read a file and tells what it found.
func snapshot(c *cobra.Command, verb, path string, asJSON bool) error {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return exit(exitUsage, err)
	case !info.Mode().IsRegular():
		return usagef("%s is no file; try: one of the .db files in the folder users of a data_dir", path)
	}
	if inUse(path) {
		fmt.Fprintf(c.ErrOrStderr(), "%s is open in another process: a change under way would look like damage; try: a copy\n", path)
	}
	r, err := readInChild(c.Context(), verb, path, info.Size())
	if err != nil {
		return exit(exitFailure, err)
	}
	switch {
	case r.Unreadable != "":
		return usagef("%s", r.Unreadable)
	case r.Failed != "":
		return exit(exitFailure, errors.New(r.Failed))
	}
	if err := r.print(c.OutOrStdout(), verb, asJSON); err != nil {
		return exit(exitFailure, err)
	}
	if !r.Whole {
		return exit(exitDamaged, nil)
	}
	return nil
}

// inUse reports whether another process has a file open as bbolt does.
func inUse(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false // the child will say what is wrong
	}
	defer f.Close() // and gives the lock back
	return unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) == unix.EWOULDBLOCK
}

// A fileReport is a line of "sluice snapshot --json". What could not be found out is left out.
type fileReport struct {
	File   string   `json:"file"`
	Size   int64    `json:"size"`
	Whole  bool     `json:"whole"`
	Faults []string `json:"faults,omitempty"`
	More   uint64   `json:"more_faults,omitempty"` // beyond those named

	Kind       string `json:"kind,omitempty"`
	Format     uint32 `json:"format,omitempty"`
	Dataset    string `json:"dataset,omitempty"`
	Lineage    string `json:"lineage,omitempty"`
	Revision   uint64 `json:"revision"`
	Root       string `json:"root,omitempty"`
	Records    uint64 `json:"records"` // that are whole
	Bad        uint64 `json:"bad_records"`
	Users      uint64 `json:"users"`
	Devices    uint64 `json:"devices"`
	Overlay    uint64 `json:"overlay"`
	Incomplete bool   `json:"incomplete,omitempty"` // a transfer had not ended
	Generation uint64 `json:"generation,omitempty"`
	Written    string `json:"written,omitempty"` // RFC 3339
	Program    string `json:"program,omitempty"`
	PageSize   int    `json:"page_size,omitempty"`
	Pages      uint64 `json:"pages,omitempty"`

	Repaired string `json:"repaired,omitempty"` // the file that was written

	// Why there is no report. Unreadable: this program is not the one to read the file. Failed: the system
	// does not let it.
	Unreadable string `json:"unreadable,omitempty"`
	Failed     string `json:"failed,omitempty"`
}

func reportOf(f *usercache.FileReport) *fileReport {
	r := &fileReport{
		File: f.Path, Size: f.Size, Whole: f.Whole, Faults: f.Faults, More: f.More,
		Kind: string(f.Kind), Format: f.Format, Revision: f.Revision, Records: f.Good, Bad: f.Bad,
		Overlay: f.Overlay, Incomplete: f.Oldest != 0, Generation: f.Generation, Program: f.Program,
		PageSize: f.PageSize, Pages: f.Pages,
	}
	if !f.Identity.IsZero() {
		r.Dataset, r.Lineage = fmt.Sprintf("%x", f.Identity.Dataset[:]), fmt.Sprintf("%x", f.Identity.Lineage[:])
	}
	if f.Pages > 0 {
		r.Root = f.Root.String()
	}
	if f.Kind == usercache.Users {
		r.Users, r.Devices = f.Totals.Users, f.Totals.Devices
	}
	if !f.Written.IsZero() {
		r.Written = f.Written.Format(time.RFC3339)
	}
	return r
}

func (r *fileReport) print(out io.Writer, verb string, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(out).Encode(r)
	}
	var b bytes.Buffer
	if verb == "inspect" {
		w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
		for _, row := range []struct {
			name  string
			value any
		}{
			{"kind", r.Kind}, {"dataset", r.Dataset}, {"lineage", r.Lineage}, {"revision", r.Revision}, {"root", r.Root},
			{"records", r.Records}, {"users", r.Users}, {"devices", r.Devices}, {"overlay", r.Overlay},
			{"format", r.Format}, {"generation", r.Generation}, {"written", r.Written}, {"by program", r.Program},
			{"size", fmt.Sprintf("%d bytes, %d pages of %d", r.Size, r.Pages, r.PageSize)},
		} {
			fmt.Fprintf(w, "%s\t%v\n", row.name, row.value)
		}
		_ = w.Flush() // a bytes.Buffer takes everything
		if r.Incomplete {
			fmt.Fprintln(&b, "A transfer from the service had not ended: records are missing.")
		}
	}
	if r.Whole {
		fmt.Fprintf(&b, "%s: whole: %d records of %s at revision %d\n", r.File, r.Records, cmp.Or(r.Kind, "no kind"), r.Revision)
	} else {
		fmt.Fprintf(&b, "%s: damaged; %d records are whole, %d are not\n", r.File, r.Records, r.Bad)
		for _, f := range r.Faults {
			fmt.Fprintf(&b, "  %s\n", f)
		}
		if r.More > 0 {
			fmt.Fprintf(&b, "  and %d more\n", r.More)
		}
	}
	switch {
	case r.Repaired != "":
		fmt.Fprintf(&b, "%s: written, with %d records\n", r.Repaired, r.Records)
	case verb == "repair":
		fmt.Fprintf(&b, "nothing could be salvaged, so %s.repaired was not written\n", r.File)
	}
	_, err := out.Write(b.Bytes())
	return err
}

// readerCommand is the hidden subcommand that a child is started with: it is not for people.
const readerCommand = "snapshot-reader"

// How much a child may use. The walker needs a bit for each page and the largest page, which in a hostile file
// may be the whole; a repair holds all records and their indexes, in chunks of a megabyte for each of 256 shards.
const (
	verifyMemory   = 256 << 20 // bytes, and
	verifyPerByte  = 3         // times the size of the file
	repairMemory   = 1 << 30
	repairPerByte  = 8
	readerTime     = time.Minute
	readerBytesSec = 4 << 20 // bytes of the file for which a second is added
	maxReport      = 4 << 20 // bytes of a child's report: some hundred faults
)

// readInChild has a child read a file. A child that ends without a report has met something in the file that
// nobody thought of: that is damage, too.
func readInChild(ctx context.Context, verb, path string, size int64) (*fileReport, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	memory := verifyMemory + size*verifyPerByte
	if verb == "repair" {
		memory = repairMemory + size*repairPerByte
	}
	limit := readerTime + time.Duration(size/readerBytesSec)*time.Second
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, self, readerCommand, verb, strconv.FormatInt(memory, 10), path)
	report, said := &bounded{max: maxReport}, &bounded{max: 16 << 10}
	cmd.Stdout, cmd.Stderr = report, said
	err = cmd.Run()
	var ended *exec.ExitError
	switch {
	case ctx.Err() == context.Canceled:
		return nil, ctx.Err()
	case err != nil && ctx.Err() == nil && !errors.As(err, &ended):
		return nil, fmt.Errorf("starting a process to read %s: %w", path, err)
	}
	r := new(fileReport)
	if err == nil {
		if err = json.Unmarshal(report.Bytes(), r); err == nil {
			return r, nil
		}
	}
	why := err.Error()
	if ctx.Err() != nil {
		why = fmt.Sprintf("it was not done after %v", limit)
	} else if first, _, _ := strings.Cut(strings.TrimSpace(said.String()), "\n"); first != "" {
		why += ": " + first
	}
	return &fileReport{File: path, Size: size, Faults: []string{fmt.Sprintf("the process that read the file ended without a report: %s (it could use %d bytes of memory)", why, memory)}}, nil
}

// A bounded buffer keeps the first max bytes.
type bounded struct {
	bytes.Buffer
	max int
}

func (b *bounded) Write(p []byte) (int, error) {
	b.Buffer.Write(p[:min(len(p), max(0, b.max-b.Len()))])
	return len(p), nil
}

// snapshotReaderCommand is the child of "sluice snapshot".
func snapshotReaderCommand() *cobra.Command {
	return &cobra.Command{
		Use:    readerCommand + " VERB MEMORY FILE",
		Hidden: true,
		Args:   cobra.ExactArgs(3),
		RunE: func(c *cobra.Command, args []string) error {
			memory, err := strconv.ParseInt(args[1], 10, 64)
			if err != nil || memory <= 0 {
				return usagef("%q is no number of bytes", args[1])
			}
			if err := limitMemory(memory); err != nil {
				return exit(exitFailure, err)
			}
			if err := json.NewEncoder(c.OutOrStdout()).Encode(read(args[0], args[2])); err != nil {
				return exit(exitFailure, err)
			}
			return nil
		},
	}
}

// limitMemory makes this process fail when it wants more than so many bytes beyond what it has.
func limitMemory(more int64) error {
	// RLIMIT_DATA counts private writable memory, and so not what the Go runtime merely reserves.
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	var has int64
	if _, after, ok := strings.Cut(string(status), "VmData:"); ok {
		if _, err := fmt.Sscanf(after, "%d kB", &has); err != nil {
			return fmt.Errorf("VmData in /proc/self/status: %w", err)
		}
	}
	debug.SetMemoryLimit(more / 4 * 3)
	n := uint64(has<<10 + more)
	return unix.Setrlimit(unix.RLIMIT_DATA, &unix.Rlimit{Cur: n, Max: n})
}

// read does a child's work.
func read(verb, path string) *fileReport {
	var f *usercache.FileReport
	var err error
	to := ""
	if verb == "repair" {
		to = path + ".repaired"
		if _, err := os.Lstat(to); err == nil {
			return &fileReport{Unreadable: to + " exists; move it away"}
		}
		f, err = usercache.RepairFile(path, to)
	} else {
		f, err = usercache.Verify(path)
	}
	switch {
	case errors.Is(err, usercache.ErrNewerFormat), errors.Is(err, os.ErrPermission):
		return &fileReport{Unreadable: err.Error()}
	case err != nil && (verb == "repair" || f == nil):
		return &fileReport{Failed: err.Error()}
	}
	r := reportOf(f)
	if err != nil { // the disk does not give it all
		r.Whole, r.Faults = false, append(r.Faults, err.Error())
	}
	if r.Repaired = to; to != "" && !r.Whole && r.Records == 0 {
		// An empty file in the place of the damaged one would look like something.
		if err := os.Remove(to); err != nil {
			return &fileReport{Failed: err.Error()}
		}
		r.Repaired = ""
	}
	return r
}
