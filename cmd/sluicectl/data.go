package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

func (a *app) addData(root *cobra.Command) {
	root.AddCommand(a.importCommand(), a.exportCommand())
}

const (
	// batchLines and batchBytes bound one commit of an import: what the service takes, and what fits well
	// below its longest message.
	batchLines = 1000
	batchBytes = 8 << 20

	// maxLine is the longest line: a record has at most 256 KiB, and JSON is wordier.
	maxLine = 2 << 20
)

func (a *app) importCommand() *cobra.Command {
	var file string
	var accept bool
	c := &cobra.Command{
		Use: "import -f FILE", Short: "Take users, policies and lists from JSON lines", Args: cobra.NoArgs,
		Long: `Take {"user":{…}}, {"policy":{…}} and {"list":{…}} from the lines of a file; existing ones are replaced.
Every 1,000 lines are one revision, all or nothing. An import that broke off goes on where it stopped when the
same file is given again.`,
	}
	c.Flags().StringVarP(&file, "file", "f", "", "`file` of JSON lines; - reads standard input")
	c.Flags().BoolVar(&accept, "accept-shrink", false, "the shrink guard does not object")
	mustMark(c.MarkFlagRequired("file"))
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		if err := ch.unconditional("an import changes many records"); err != nil {
			return err
		}
		in, id, err := a.openImport(file)
		if err != nil {
			return err
		}
		defer in.Close()
		return a.atService(func(conn *grpc.ClientConn) error {
			im := importing{a: a, to: adminv1.NewDataServiceClient(conn), id: id, name: fileName(file), accept: accept, revisions: map[string]uint64{}}
			if err := im.run(c.Context(), in); err != nil {
				return err
			}
			a.note("%s: %d lines taken, %d objects changed", im.name, im.last.NextLine-1, im.last.Changed)
			if err := ch.print(im.last, im.last.Revision); err != nil {
				return err
			}
			return ch.await(c.Context(), im.revisions)
		})
	}
	return c
}

// openImport opens a file and takes its SHA-256, by which the service knows how far it has come. Standard input
// is copied to a file of its own first, since it has to be read twice.
func (a *app) openImport(file string) (f *os.File, id string, err error) {
	if file == "-" {
		if f, err = os.CreateTemp("", "sluicectl-import-*"); err == nil {
			_ = os.Remove(f.Name()) // it goes when it is closed
			_, err = io.Copy(f, a.stdin)
		}
	} else {
		f, err = os.Open(file)
	}
	if err != nil {
		return nil, "", failedf("%w", err)
	}
	h := sha256.New()
	_, err = f.Seek(0, io.SeekStart)
	if err == nil {
		_, err = io.Copy(h, f)
	}
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		f.Close()
		return nil, "", failedf("reading %s: %w", fileName(file), err)
	}
	return f, hex.EncodeToString(h.Sum(nil)), nil
}

// An importing is one import under way.
type importing struct {
	a      *app
	to     adminv1.DataServiceClient
	id     string
	name   string
	accept bool

	last      *adminv1.ImportResponse // sums of all batches
	revisions map[string]uint64       // of the last commit, by kind of dataset
}

func (im *importing) run(ctx context.Context, in io.Reader) error {
	if err := im.send(ctx, &adminv1.ImportRequest{Id: im.id}); err != nil {
		return err
	}
	next := max(im.last.NextLine, 1)
	if next > 1 {
		im.a.note("%s: going on at line %d", im.name, next)
	}
	r := bufio.NewReaderSize(in, 64<<10)
	req := &adminv1.ImportRequest{Id: im.id, AcceptShrink: im.accept}
	size := 0
	for n := uint64(1); ; n++ {
		line, err := readLine(r)
		if err != nil && err != io.EOF {
			return failedf("%s:%d: %w", im.name, n, err)
		}
		end := err == io.EOF
		if !end && n >= next {
			if len(req.Lines) == 0 {
				req.FirstLine = n
			}
			req.Lines = append(req.Lines, line)
			size += len(line)
		}
		if len(req.Lines) == batchLines || size >= batchBytes || end && len(req.Lines) > 0 {
			if err := im.send(ctx, req); err != nil {
				return err
			}
			req.Lines, size = nil, 0
		}
		if end {
			return nil
		}
	}
}

// send sends a batch and adds up what comes back.
func (im *importing) send(ctx context.Context, req *adminv1.ImportRequest) error {
	call, cancel := context.WithTimeout(ctx, max(im.a.timeout, compileWithin)) // lists in it may have to be fetched
	defer cancel()
	resp, err := im.to.Import(call, req)
	if err != nil {
		return im.explain(err)
	}
	if im.last == nil {
		im.last = &adminv1.ImportResponse{}
	}
	im.last.Revision, im.last.NextLine = resp.Revision, resp.NextLine
	im.last.Changed += resp.Changed
	for _, kind := range resp.Datasets {
		if _, known := im.revisions[kind]; !known {
			im.last.Datasets = append(im.last.Datasets, kind)
		}
		im.revisions[kind] = resp.Revision
	}
	return nil
}

// explain says FILE:LINE and how far the import has come.
func (im *importing) explain(err error) error {
	f, ok := errors.AsType[*failure](refused(im.a.service, err))
	if !ok {
		return err
	}
	if n, ok := fieldLine(f.Field); ok {
		f.Message = fmt.Sprintf("%s:%d: %s", im.name, n, trimField(f.Message, f.Field))
	}
	if im.last.GetNextLine() > 1 {
		f.Message += fmt.Sprintf(" (lines below %d are taken; give the file again to go on)", im.last.NextLine)
	}
	return f
}

// trimField takes "FIELD: " off a message that begins with it.
func trimField(message, field string) string {
	if n := len(field) + 2; len(message) > n && message[:n] == field+": " {
		return message[n:]
	}
	return message
}

// readLine reads a line without its end; io.EOF comes alone, after the last line.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if len(line)+len(part) > maxLine {
			return nil, fmt.Errorf("the line has more than %d bytes", maxLine)
		}
		line = append(line, part...)
		switch err {
		case nil:
			line = line[:len(line)-1]
			if n := len(line); n > 0 && line[n-1] == '\r' {
				line = line[:n-1]
			}
			return line, nil
		case bufio.ErrBufferFull:
		case io.EOF:
			if len(line) == 0 {
				return nil, io.EOF
			}
			return line, nil
		default:
			return nil, err
		}
	}
}

func (a *app) exportCommand() *cobra.Command {
	var file, only string
	c := &cobra.Command{Use: "export -f FILE", Short: "Write users, policies and lists as JSON lines that import takes", Args: cobra.NoArgs}
	c.Flags().StringVarP(&file, "file", "f", "", "`file` to write, replaced when all is there; - writes to standard output")
	c.Flags().StringVar(&only, "only", "", "only records of this `kind`: user, policy, list or entry")
	mustMark(c.MarkFlagRequired("file"))
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.atService(func(conn *grpc.ClientConn) error {
			stream, err := adminv1.NewDataServiceClient(conn).Export(c.Context(), &adminv1.ExportRequest{Only: only})
			if err != nil {
				return err
			}
			n := 0
			err = a.writeFile(file, func(w *bufio.Writer) error {
				for {
					resp, err := stream.Recv()
					if err == io.EOF {
						return nil
					}
					if err != nil {
						return refused(a.service, err)
					}
					for _, line := range resp.Lines {
						n++
						_, _ = w.Write(line) // bufio keeps an error for Flush
						_ = w.WriteByte('\n')
					}
				}
			})
			if err == nil {
				a.note("%d lines written to %s", n, file)
			}
			return err
		})
	}
	return c
}

// writeFile writes a file by way of a temporary one beside it, so that a failure leaves what was there; "-" is
// standard output. What is written may hold passwords' hashes: it is for this user alone.
func (a *app) writeFile(file string, write func(*bufio.Writer) error) error {
	if file == "-" {
		w := bufio.NewWriterSize(a.stdout, 64<<10)
		if err := write(w); err != nil {
			return err
		}
		if err := w.Flush(); err != nil {
			return failedf("writing: %w", err)
		}
		return nil
	}
	f, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+"-*")
	if err != nil {
		return failedf("%w", err)
	}
	defer os.Remove(f.Name()) // fails once it is renamed
	defer f.Close()
	w := bufio.NewWriterSize(f, 64<<10)
	if err := write(w); err != nil {
		return err
	}
	if err := errors.Join(w.Flush(), f.Sync(), f.Close()); err != nil {
		return failedf("writing %s: %w", file, err)
	}
	if err := os.Rename(f.Name(), file); err != nil {
		return failedf("%w", err)
	}
	return nil
}
