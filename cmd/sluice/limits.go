package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/sluice-dns/sluice/cmd/internal/config"
	"github.com/sluice-dns/sluice/cmd/internal/node"
	"github.com/sluice-dns/sluice/resolver"
)

func limitsCommand() *cobra.Command {
	var (
		file, class, memory string
		cpus                int
		asJSON              bool
	)
	c := &cobra.Command{
		Use:   "limits [--class C] [--memory SIZE] [--cpus N] [-c FILE] [--json]",
		Short: "Print the table of limits and where each number comes from",
		Long: `Print the table of limits and where each number comes from, for this machine or
for one with the memory and processors given, under the configuration given.
Exit status 2 if the class or a limit does not fit the machine.`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if c.Flags().Changed("cpus") && cpus == 0 {
				return usagef("--cpus 0 is not a number of processors; try: 1 or more")
			}
			m, err := machine(memory, cpus)
			if err != nil {
				return err
			}
			cfg, faults := config.Load(file)
			if len(faults) == 0 {
				if class != "" {
					cfg.Limits.Class = class
				}
				var t resolver.LimitsTable
				if t, faults = limitsFor(m, cfg); len(faults) == 0 {
					return printLimits(c, t, asJSON)
				}
			}
			if file == "" { // nowhere to point at
				return usagef("%s: %s; try: %s", faults[0].Key, faults[0].What, faults[0].Try)
			}
			for _, f := range faults {
				fmt.Fprintln(c.ErrOrStderr(), f)
			}
			return exit(exitUsage, nil)
		},
	}
	f := c.Flags()
	f.StringVarP(&file, "config", "c", "", "configuration `file`")
	f.StringVar(&class, "class", "", "hardware `class`: auto, 2g, 8g, 32g, 64g, … (default that of the configuration)")
	f.StringVar(&memory, "memory", "", "memory of the machine, a `size` such as 32GiB (default that of this machine)")
	f.IntVar(&cpus, "cpus", 0, "`number` of processors (default those of this machine)")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

// machine is this machine, except for what the command line says.
func machine(memory string, cpus int) (resolver.Machine, error) {
	var given resolver.Machine
	if memory != "" {
		size, err := config.ParseSize(memory)
		if err != nil {
			return given, usagef("--memory %q %w", memory, err)
		}
		given.Memory, given.MemoryFrom = size, "--memory"
	}
	if cpus < 0 || cpus > math.MaxInt32 {
		return given, usagef("--cpus %d is not a number of processors; try: 1 or more", cpus)
	}
	given.CPUs, given.CPUsFrom = cpus, "--cpus"
	if memory != "" && cpus > 0 {
		return given, nil
	}
	m, err := resolver.ReadMachine(os.DirFS("/"))
	if err != nil {
		return m, exit(exitFailure, err)
	}
	if memory != "" {
		m.Memory, m.MemoryFrom = given.Memory, given.MemoryFrom
	}
	if cpus > 0 {
		m.CPUs, m.CPUsFrom = given.CPUs, given.CPUsFrom
	}
	return m, nil
}

// limitsFor makes the table of limits for a machine under a configuration, or
// says which key does not fit it.
func limitsFor(m resolver.Machine, cfg *config.Sluice) (resolver.LimitsTable, []config.Fault) {
	t, err := resolver.LimitsFor(m, node.LimitsOptions(cfg))
	if err == nil {
		return t, nil
	}
	key, what, try := "limits", err.Error(), "less"
	var e *resolver.LimitsError
	if errors.As(err, &e) {
		key, what, try = "limits."+e.Name, e.What, e.Try
		switch {
		case e.Name == "cache" && cfg.Cache.Size > 0:
			key = "cache.size"
		case e.Name == "workers":
			key = "listen.workers"
		}
	}
	return t, []config.Fault{cfg.Fault(key, what, try)}
}

func printLimits(c *cobra.Command, t resolver.LimitsTable, asJSON bool) error {
	out := c.OutOrStdout()
	if asJSON {
		if err := json.NewEncoder(out).Encode(t.Rows()); err != nil {
			return exit(exitFailure, err)
		}
		return nil
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "LIMIT\tVALUE\tUNIT\tFROM")
	for _, r := range t.Rows() {
		value, unit := fmt.Sprint(r.Value), r.Unit
		if unit == "bytes" {
			value, unit = resolver.LimitsSize(r.Value), ""
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", r.Name, value, unit, r.From)
	}
	if err := w.Flush(); err != nil {
		return exit(exitFailure, err)
	}
	return nil
}
