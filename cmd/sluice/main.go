// Command sluice is the resolver: a recursive, filtering DNS resolver, and the tools that look at its files.
//
// Exit statuses are part of the interface: 0 success, 1 a failure while running,
// 2 a configuration or command line that cannot be used. A subcommand that has
// more says so in its help. What a command finds goes to standard output, what
// keeps it from finding it to standard error.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
)

func main() {
	os.Exit(execute(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// commands are the subcommands, each made in the file of its name.
func commands() []*cobra.Command {
	return []*cobra.Command{
		runCommand(),
		checkCommand(),
		demoCommand(),
		limitsCommand(),
		matchCommand(),
		snapshotCommand(),
		snapshotReaderCommand(),
	}
}

// execute runs one command line and returns its exit status.
func execute(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := &cobra.Command{
		Use:           "sluice",
		Version:       version(),
		Short:         "A recursive, filtering DNS resolver for many users",
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.AddCommand(commands()...)
	for _, c := range root.Commands() {
		c.DisableFlagsInUseLine = true // Use writes them out
		for _, sub := range c.Commands() {
			sub.DisableFlagsInUseLine = true
		}
	}
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	var status *statusError
	if !errors.As(err, &status) {
		// Only cobra's own errors come without a status: an unknown command or
		// flag, a missing argument.
		status = &statusError{exitUsage, fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())}
	}
	if status.err != nil {
		fmt.Fprintf(stderr, "sluice: %v\n", status.err)
	}
	return status.code
}

// Exit statuses that more than one subcommand uses.
const (
	exitFailure = 1
	exitUsage   = 2
)

// A statusError ends a subcommand with an exit status. Without err everything
// has been said already.
type statusError struct {
	code int
	err  error
}

func (e *statusError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit status %d", e.code)
	}
	return e.err.Error()
}

func (e *statusError) Unwrap() error { return e.err }

// exit ends a subcommand with a status, and with a message if err is not nil.
func exit(code int, err error) error { return &statusError{code, err} }

// usagef ends a subcommand because of its command line.
func usagef(format string, args ...any) error {
	return exit(exitUsage, fmt.Errorf(format, args...))
}

// noArgs is for commands that take only flags. cobra's own would call an argument an unknown command.
func noArgs(c *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%s takes flags only, and was given %q", c.Name(), args[0])
	}
	return nil
}
