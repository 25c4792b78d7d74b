// Command sluicectl is the operator's command line: it changes users, policies and lists at the business-logic
// service, and looks at and steers resolvers, over the gRPC of proto/admin/v1.
//
// Exit statuses: 0 done, 1 refused or failed, 2 a command line that cannot be used. Results go to standard
// output, as tables for people or, with -o json, one object a line with the fields of proto/admin/v1. What went
// wrong goes to standard error; with -o json as {"code","message","field"}.
//
// What a value means (10s, nxdomain, a rewrite) is the service's to say: this program only takes apart
// KEY=VALUE, so that old and new programs agree.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	status := execute(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Getenv)
	stop()
	os.Exit(status)
}

// execute runs one command line and returns its exit status.
func execute(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer, getenv func(string) string) int {
	a := &app{stdin: stdin, stdout: stdout, stderr: stderr}
	root := a.root(getenv)
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	for _, arg := range args { // no message could carry it
		if !utf8.ValidString(arg) {
			a.json = asksForJSON(args)
			return a.complain(usagef("", "the argument %.100q is not UTF-8", arg))
		}
	}
	cmd, err := root.ExecuteContextC(ctx)
	a.close()
	if err == nil {
		return 0
	}
	if _, known := errors.AsType[*failure](err); !known {
		// Only cobra's own errors are not failures: an unknown command or flag, a missing argument.
		if strings.Contains(err.Error(), "arg(s)") { // says how many, and not which
			err = fmt.Errorf("%w; write: %s", err, strings.TrimSuffix(cmd.UseLine(), " [flags]"))
		}
		err = usagef("", "%v; see %s --help", err, cmd.CommandPath())
		a.json = asksForJSON(args) // the flags may not have been read to the end
	}
	return a.complain(err)
}

// asksForJSON finds -o json in a command line that cobra gave up on.
func asksForJSON(args []string) bool {
	for i, arg := range args {
		switch arg {
		case "-ojson", "-o=json", "--output=json":
			return true
		case "-o", "--output":
			return i+1 < len(args) && args[i+1] == "json"
		}
	}
	return false
}

// An app is one run of the program: where it reads and writes, and what its flags say.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer

	service   string
	resolvers []string
	tokenFile string
	ca        string
	cert, key string
	timeout   time.Duration
	json      bool

	conns []io.Closer
}

func (a *app) root(getenv func(string) string) *cobra.Command {
	or := func(name, def string) string {
		if v := getenv(name); v != "" {
			return v
		}
		return def
	}
	var output string
	root := &cobra.Command{
		Use:   "sluicectl",
		Short: "Change and look at a Sluice service and its resolvers",
		Long: `Change users, policies and lists at the business-logic service, and look at and steer resolvers.

Addresses are HOST:PORT or unix:PATH. Beyond loopback and unix sockets TLS is used.
SLUICE_SERVICE, SLUICE_RESOLVER (addresses with commas between) and SLUICE_TOKEN_FILE are used where
the flag is not given.`,
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRunE: func(c *cobra.Command, _ []string) error {
			switch output {
			case "json":
				a.json = true
			case "table":
			default:
				return usagef("output", "-o %q is none of table, json", output)
			}
			if len(a.resolvers) == 0 {
				for addr := range strings.SplitSeq(or("SLUICE_RESOLVER", "127.0.0.1:8053"), ",") {
					a.resolvers = append(a.resolvers, strings.TrimSpace(addr))
				}
			}
			if a.timeout <= 0 {
				return usagef("timeout", "--timeout %v is not positive", a.timeout)
			}
			return nil
		},
	}
	f := root.PersistentFlags()
	f.StringVar(&a.service, "service", or("SLUICE_SERVICE", "127.0.0.1:8054"), "`address` of the business-logic service")
	f.StringArrayVar(&a.resolvers, "resolver", nil, "`address` of a resolver; may be repeated (default 127.0.0.1:8053)")
	f.StringVar(&a.tokenFile, "token-file", getenv("SLUICE_TOKEN_FILE"), "`file` that holds a token")
	f.StringVar(&a.ca, "ca", "", "`file` of the certificates that signed the servers', in PEM; TLS is then used even on loopback")
	f.StringVar(&a.cert, "cert", "", "`file` of a client certificate, in PEM")
	f.StringVar(&a.key, "key", "", "`file` of its key, in PEM")
	f.DurationVar(&a.timeout, "timeout", 30*time.Second, "how long one call may take; imports, exports and dumps take as long as they take")
	f.StringVarP(&output, "output", "o", "table", "`format`: table or json")
	for _, add := range []func(*cobra.Command){
		a.addUsers, a.addDevices, a.addPolicies, a.addRules, a.addLists, a.addEntries, a.addData, a.addTokens, a.addResolver,
	} {
		add(root)
	}
	return root
}

func (a *app) close() {
	for _, c := range slices.Backward(a.conns) {
		_ = c.Close() // nothing is left to be lost
	}
}

// Exit statuses.
const (
	exitFailed = 1
	exitUsage  = 2
)

// group adds a command that only has subcommands.
func group(root *cobra.Command, use, short string) *cobra.Command {
	g := &cobra.Command{Use: use, Short: short, Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error {
		var names []string
		for _, sub := range c.Commands() {
			names = append(names, sub.Name())
		}
		return usagef("", "%s needs one of %s", c.CommandPath(), strings.Join(names, ", "))
	}}
	root.AddCommand(g)
	return g
}

// note tells people what goes on; programs read only objects.
func (a *app) note(format string, args ...any) {
	if !a.json {
		fmt.Fprintf(a.stderr, format+"\n", args...)
	}
}
