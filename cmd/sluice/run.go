package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/sluice-dns/sluice/cmd/internal/config"
	"github.com/sluice-dns/sluice/cmd/internal/node"
)

func runCommand() *cobra.Command {
	var file, data string
	c := &cobra.Command{
		Use:   "run [-c FILE] [--data DIR]",
		Short: "Serve in the foreground; SIGTERM drains, SIGHUP reads certificates, policy, stub and forward zones again",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, faults, err := load(file)
			if err != nil {
				return err
			}
			if len(faults) > 0 {
				for _, f := range faults {
					fmt.Fprintln(c.ErrOrStderr(), f)
				}
				return exit(exitUsage, nil)
			}
			if data != "" {
				cfg.DataDir = data
			}
			return run(c, cfg, file)
		},
	}
	c.Flags().StringVarP(&file, "config", "c", "", "configuration `file`; without one every key has its default")
	c.Flags().StringVar(&data, "data", "", "data `directory`, in place of the configuration's")
	return c
}

func run(c *cobra.Command, cfg *config.Sluice, file string) error {
	level := new(slog.LevelVar)
	log := newLogger(c, &cfg.Log, level)
	n, err := node.Start(cfg, node.Options{Logger: log, Level: level, Version: version(), OwnProcess: true})
	if err != nil {
		return exit(exitFailure, err)
	}
	defer n.Close()

	ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-hangup:
				n.Reload(again(file, log))
			}
		}
	}()
	said := make(chan struct{})
	context.AfterFunc(ctx, func() {
		defer close(said)
		stop() // a second signal ends the process at once
		log.Info("draining: no new queries are taken, those under way are answered")
	})
	if err := n.Run(ctx); err != nil {
		return exit(exitFailure, err)
	}
	if ctx.Err() != nil {
		<-said // in this order
	}
	log.Info("stopped")
	return nil
}

// again reads the configuration file once more; nil if it has faults, which are logged.
func again(file string, log *slog.Logger) *config.Sluice {
	cfg, faults, err := load(file)
	if err != nil {
		log.Error("reading the configuration again; the one before stays", "err", err)
	}
	for _, f := range faults {
		log.Error("the configuration has a fault; the one before stays", "fault", f.String())
	}
	if err != nil || len(faults) > 0 {
		return nil
	}
	return cfg
}

func newLogger(c *cobra.Command, l *config.Log, level *slog.LevelVar) *slog.Logger {
	level.Set(map[config.LogLevel]slog.Level{
		config.LevelDebug: slog.LevelDebug, config.LevelInfo: slog.LevelInfo,
		config.LevelWarn: slog.LevelWarn, config.LevelError: slog.LevelError,
	}[l.Level])
	o := &slog.HandlerOptions{Level: level}
	if l.Format == config.FormatJSON {
		return slog.New(slog.NewJSONHandler(c.ErrOrStderr(), o))
	}
	return slog.New(slog.NewTextHandler(c.ErrOrStderr(), o))
}

// version is the module's, or that of the commit it was built from.
func version() string {
	b, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if v := b.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range b.Settings {
		if s.Key == "vcs.revision" {
			return s.Value
		}
	}
	return "devel"
}
