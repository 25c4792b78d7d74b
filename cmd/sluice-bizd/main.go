// Command sluice-bizd is the reference business-logic service: it keeps users, devices, policies and filter
// lists, and tells resolvers of every change.
//
// Exit statuses are part of the interface: 0 success, 1 a failure while running, 2 a configuration or
// command line that cannot be used.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/sluice-dns/sluice/cmd/internal/config"
)

const (
	exitFailure = 1
	exitUsage   = 2
)

func main() {
	os.Exit(execute(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// execute runs one command line and returns its exit status.
func execute(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := &cobra.Command{
		Use:           "sluice-bizd",
		Version:       version(),
		Short:         "The business-logic service of Sluice",
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.AddCommand(runCommand(), checkCommand(), backupCommand(), restoreCommand(), migrateCommand())
	for _, c := range root.Commands() {
		c.DisableFlagsInUseLine = true // Use writes them out
	}
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	var failed *failure
	if !errors.As(err, &failed) { // cobra's own: an unknown command or flag, a missing argument
		failed = &failure{exitUsage, fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())}
	}
	if failed.err != nil {
		fmt.Fprintf(stderr, "sluice-bizd: %v\n", failed.err)
	}
	return failed.code
}

// A failure ends a command with an exit status. Without err everything has been said already.
type failure struct {
	code int
	err  error
}

func (f *failure) Error() string { return fmt.Sprintf("exit status %d: %v", f.code, f.err) }

// failed is a failure while running, nil for nil.
func failed(err error) error {
	if err == nil {
		return nil
	}
	return &failure{exitFailure, err}
}

// configFlag adds -c.
func configFlag(c *cobra.Command) *string {
	return c.Flags().StringP("config", "c", "", "configuration `FILE`; defaults without one")
}

// load reads the configuration. Its faults go to w, one a line.
func load(file string, w io.Writer) (*config.Bizd, error) {
	cfg, faults := config.LoadBizd(file)
	if len(faults) == 0 && cfg.Store != "" {
		faults = []config.Fault{{File: file, Line: 1, Col: 1, Key: "store", What: "a PostgreSQL store is not part of this program yet", Try: `"", for a file in data_dir`}}
	}
	if len(faults) == 0 {
		return cfg, nil
	}
	for _, f := range faults {
		fmt.Fprintln(w, f)
	}
	return nil, &failure{exitUsage, nil}
}

func checkCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "check -c FILE",
		Short: "Name every fault of a configuration, one a line",
		Args:  noArgs,
	}
	file := configFlag(c)
	_ = c.MarkFlagRequired("config")
	c.RunE = func(c *cobra.Command, _ []string) error {
		_, err := load(*file, c.OutOrStdout()) // faults are what was asked for
		return err
	}
	return c
}

// noArgs is for commands that take only flags. cobra's own would call an argument an unknown command.
func noArgs(c *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%s takes flags only, and was given %q", c.Name(), args[0])
	}
	return nil
}
