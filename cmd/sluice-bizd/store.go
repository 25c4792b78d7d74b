package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/sluice-dns/sluice/cmd/internal/bizlogic"
	"github.com/sluice-dns/sluice/cmd/internal/config"
	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

func backupCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "backup [-c FILE] ARCHIVE",
		Short: "Write a consistent copy of the store and its lists to a tar archive",
		Long: `Write a consistent copy of the store and its lists to a tar archive, which must
not exist yet. The service may be running, if it listens on loopback or a unix
socket without TLS.`,
		Args: cobra.ExactArgs(1),
	}
	file := configFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		cfg, err := load(*file, c.ErrOrStderr())
		if err != nil {
			return err
		}
		return failed(writeNew(args[0], func(w io.Writer) error { return backup(c.Context(), cfg, w) }))
	}
	return c
}

// backup copies the store, by the running service if there is one.
func backup(ctx context.Context, cfg *config.Bizd, w io.Writer) error {
	err := bizlogic.BackupClosed(cfg.DataDir, w)
	if !errors.Is(err, bizlogic.ErrLocked) {
		return err
	}
	if cfg.TLS.Cert != "" {
		return fmt.Errorf("%w; with TLS its own backup cannot be asked for from here: stop it first", err)
	}
	addr := cfg.Listen.String()
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := adminv1.NewDataServiceClient(conn).Backup(ctx, &adminv1.BackupRequest{})
	if err != nil {
		return fmt.Errorf("asking the service at %s: %w", addr, err)
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("asking the service at %s: %w", addr, err)
		}
		if _, err := w.Write(m.GetData()); err != nil {
			return err
		}
	}
}

// writeNew makes a file that must not exist, whole or not at all.
func writeNew(path string, write func(io.Writer) error) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".backup-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	err = write(tmp)
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err != nil {
		return err
	}
	if err := os.Link(tmp.Name(), path); err != nil { // unlike a rename, never replaces
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

func restoreCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "restore [-c FILE] ARCHIVE",
		Short: "Unpack a backup into an empty data_dir",
		Long: `Unpack a backup into data_dir, which must hold no store. The store continues
under a new lineage: resolvers compare and take over what differs.`,
		Args: cobra.ExactArgs(1),
	}
	file := configFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		cfg, err := load(*file, c.ErrOrStderr())
		if err != nil {
			return err
		}
		f, err := os.Open(args[0])
		if err != nil {
			return failed(err)
		}
		defer f.Close()
		return failed(bizlogic.Restore(cfg.DataDir, f))
	}
	return c
}

func migrateCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "migrate [-c FILE]",
		Short: "Bring the store to this program's format and rebuild what derives from its records",
		Args:  noArgs,
	}
	file := configFlag(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := load(*file, c.ErrOrStderr())
		if err != nil {
			return err
		}
		found, err := bizlogic.Migrate(cfg.DataDir)
		for _, f := range found {
			fmt.Fprintln(c.OutOrStdout(), f)
		}
		return failed(err)
	}
	return c
}
