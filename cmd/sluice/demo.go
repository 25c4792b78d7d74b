package main

import (
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/sluice-dns/sluice/cmd/internal/demo"
)

func demoCommand() *cobra.Command {
	var o demo.Options
	c := &cobra.Command{
		Use:   "demo [--json] [--hold]",
		Short: "Run the whole system offline and check that it works",
		Long: `Run the whole system offline and check that it works: a small signed Internet, a
business-logic service, two resolvers and two users, all in this process and on
loopback. Nothing is installed, asked of the network or left behind.

Exit status 0 if every check passed, else 1.`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGTERM, os.Interrupt)
			defer stop()
			o.Out, o.Err, o.Version = c.OutOrStdout(), c.ErrOrStderr(), version()
			failed, err := demo.Run(ctx, o)
			if err != nil || failed > 0 {
				return exit(exitFailure, err)
			}
			return nil
		},
	}
	c.Flags().BoolVar(&o.JSON, "json", false, "print one JSON object for each check, then the counts")
	c.Flags().BoolVar(&o.Hold, "hold", false, "go on serving after the checks until interrupted, and print how to ask")
	return c
}
