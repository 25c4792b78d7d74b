package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

func (a *app) addRules(root *cobra.Command) {
	g := group(root, "rules", "The own rules of policies, users and devices")
	g.AddCommand(a.rulesGet(), a.rulesSet())
}

func (a *app) rulesGet() *cobra.Command {
	return &cobra.Command{Use: "get TARGET", Short: "Print the rules of policy/P, USER or USER/DEVICE", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeArgs(targets),
		RunE: func(c *cobra.Command, args []string) error {
			if err := checkTarget(args[0]); err != nil {
				return err
			}
			return a.atService(func(conn *grpc.ClientConn) error {
				ctx, cancel := a.call(c.Context())
				defer cancel()
				resp, err := adminv1.NewPolicyServiceClient(conn).GetRules(ctx, &adminv1.GetRulesRequest{Target: args[0]})
				if err != nil {
					return err
				}
				if a.json {
					return show(a, []*adminv1.GetRulesResponse{resp}, nil)
				}
				// As they were stored, so that `rules set` can take them back.
				if _, err := a.stdout.Write(resp.Text); err != nil {
					return failedf("writing: %w", err)
				}
				return nil
			})
		}}
}

// maxRules is the longest text of own rules that the service takes; reading stops there.
const maxRules = 1 << 20

func (a *app) rulesSet() *cobra.Command {
	var file string
	req := &adminv1.SetRulesRequest{}
	c := &cobra.Command{
		Use: "set TARGET -f FILE|-", Short: "Replace the rules of policy/P, USER or USER/DEVICE",
		Long: `Replace the rules of policy/P, USER or USER/DEVICE by those of a file.
A rule is one of AdGuard's syntax: ||ads.example^ blocks a name and all below it, @@||cdn.ads.example^ excepts,
$important, $dnstype, $client, $ctag, $denyallow and $dnsrewrite modify. Lines of hosts files and plain names work too.
Lines that cannot be used are named FILE:LINE; then nothing is stored and the exit status is 1, unless
--keep-good says to store the rest.`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeArgs(targets),
	}
	c.Flags().StringVarP(&file, "file", "f", "", "`file` of rules, one a line; - reads standard input")
	c.Flags().BoolVar(&req.KeepGood, "keep-good", false, "store what can be used and drop the rest")
	c.Flags().BoolVar(&req.DryRun, "dry-run", false, "check only, store nothing")
	mustMark(c.MarkFlagRequired("file"))
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := checkTarget(args[0]); err != nil {
			return err
		}
		text, err := a.readFile(file, maxRules)
		if err != nil {
			return err
		}
		req.Target, req.Text, req.IfRevision = args[0], text, ch.ifRevision
		return a.atService(func(conn *grpc.ClientConn) error {
			ctx, cancel := a.call(c.Context())
			defer cancel()
			resp, err := adminv1.NewPolicyServiceClient(conn).SetRules(ctx, req)
			if err != nil {
				return err
			}
			refusal := len(resp.Complaints) > 0 && !req.KeepGood
			if refusal || !a.json { // kept rules: the object holds the complaints
				a.complaints(file, resp.Complaints)
			}
			if refusal {
				return &failure{exit: exitFailed, Message: fmt.Sprintf("%s: lines that cannot be used: %d; nothing is stored", fileName(file), len(resp.Complaints)),
					Code: "INVALID_ARGUMENT", Field: "text"}
			}
			a.note("%s: rules: %d", args[0], resp.Rules)
			if req.DryRun {
				return show(a, []*adminv1.SetRulesResponse{resp}, func() *table { return &table{} })
			}
			return ch.done(c.Context(), resp)
		})
	}
	return c
}

// complaints names the lines of a file that cannot be used.
func (a *app) complaints(file string, list []*adminv1.Complaint) {
	for _, one := range list {
		if a.json {
			a.complain(&failure{Code: "INVALID_ARGUMENT", Field: "text", Message: fmt.Sprintf("%s:%d: %s", fileName(file), one.Line, one.What)})
			continue
		}
		fmt.Fprintf(a.stderr, "%s:%d: %s: %s\n", fileName(file), one.Line, clean(one.What), clean(one.Text))
	}
}

// fileName is how a file is called in messages.
func fileName(file string) string {
	if file == "-" {
		return "standard input"
	}
	return file
}

// readFile reads a file, or standard input for "-", of at most so many bytes.
func (a *app) readFile(file string, most int64) ([]byte, error) {
	var in io.Reader = a.stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, failedf("%w", err)
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, most+1))
	if err != nil {
		return nil, failedf("reading %s: %w", fileName(file), err)
	}
	if int64(len(b)) > most {
		return nil, failedf("%s has more than %d bytes", fileName(file), most)
	}
	return b, nil
}

// mustMark panics on a flag that does not exist, a fault of this program.
func mustMark(err error) {
	if err != nil {
		panic(err)
	}
}

// fieldLine reads "line N", as imports name the line they stop at.
func fieldLine(field string) (n uint64, ok bool) {
	rest, ok := strings.CutPrefix(field, "line ")
	if !ok {
		return 0, false
	}
	_, err := fmt.Sscanf(rest, "%d", &n)
	return n, err == nil
}
