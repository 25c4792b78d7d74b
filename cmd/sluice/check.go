package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/sluice-dns/sluice/cmd/internal/config"
	"github.com/sluice-dns/sluice/cmd/internal/node"
	"github.com/sluice-dns/sluice/resolver"
)

// load reads a configuration and judges it by this machine and this version: what it finds no fault with, run
// can serve.
func load(file string) (*config.Sluice, []config.Fault, error) {
	cfg, faults := config.Load(file)
	if len(faults) > 0 {
		return nil, faults, nil
	}
	m, err := resolver.ReadMachine(os.DirFS("/"))
	if err != nil {
		return nil, nil, exit(exitFailure, err)
	}
	_, faults = limitsFor(m, cfg)
	faults = append(faults, node.Unserved(cfg)...)
	return cfg, append(faults, node.Unusable(cfg)...), nil
}

func checkCommand() *cobra.Command {
	var file string
	c := &cobra.Command{
		Use:   "check -c FILE",
		Short: "Name every fault of a configuration",
		Long: `Name every fault of a configuration, one a line:

  FILE:LINE:COL: KEY: what is wrong; try: what may help

The limits are judged against this machine. Exit status 0 without a fault, else 2.`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			_, faults, err := load(file)
			if err != nil || len(faults) == 0 {
				return err
			}
			// The faults are what was asked for, hence standard output.
			for _, f := range faults {
				fmt.Fprintln(c.OutOrStdout(), f)
			}
			return exit(exitUsage, nil)
		},
	}
	c.Flags().StringVarP(&file, "config", "c", "", "configuration `file`")
	_ = c.MarkFlagRequired("config")
	return c
}
