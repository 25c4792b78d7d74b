package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"os/signal"
	"runtime/debug"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-dns/sluice/cmd/internal/bizlogic"
	"github.com/sluice-dns/sluice/cmd/internal/config"
	"github.com/sluice-dns/sluice/resolver/clock"
)

func runCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "run [-c FILE]",
		Short: "Serve in the foreground",
		Long: `Serve in the foreground. SIGTERM and SIGINT end it, exit status 0; SIGHUP takes
log.level and the files of tls anew.`,
		Args: noArgs,
	}
	file := configFlag(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := load(*file, c.ErrOrStderr())
		if err != nil {
			return err
		}
		ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGTERM, syscall.SIGINT)
		defer stop()
		reload := make(chan os.Signal, 1)
		signal.Notify(reload, syscall.SIGHUP)
		defer signal.Stop(reload)
		return failed(run(ctx, cfg, *file, reload, c.ErrOrStderr()))
	}
	return c
}

// run serves until ctx ends.
func run(ctx context.Context, cfg *config.Bizd, file string, reload <-chan os.Signal, logTo io.Writer) (err error) {
	level := new(slog.LevelVar)
	setLevel(level, cfg.Log.Level)
	log := slog.New(handler(logTo, cfg.Log.Format, level))
	if cfg.Testing.ClockFile != "" || cfg.Testing.WallFile != "" {
		log.Warn("the clock is that of a test", "clock_file", cfg.Testing.ClockFile, "wall_file", cfg.Testing.WallFile)
		wait, err := clock.Follow(ctx, cfg.Testing.ClockFile, cfg.Testing.WallFile)
		if err != nil {
			return err
		}
		defer wait()
	}
	var keys atomic.Pointer[tls.Config]
	if cfg.TLS.Cert != "" {
		t, err := tlsConfig(cfg.TLS)
		if err != nil {
			return err
		}
		keys.Store(t)
	}

	svc, err := bizlogic.Open(options(cfg, log))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, svc.Close()) }()

	service, err := net.Listen(cfg.Listen.Network, cfg.Listen.Address)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	opts := svc.ServerOptions()
	if keys.Load() != nil {
		opts = append(opts, grpc.Creds(credentials.NewTLS(&tls.Config{
			MinVersion:         tls.VersionTLS13,
			NextProtos:         []string{"h2"},
			GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return keys.Load(), nil },
		})))
	}
	srv := grpc.NewServer(opts...)
	svc.Register(srv)
	alive := health.NewServer()
	healthv1.RegisterHealthServer(srv, alive)

	ended := make(chan error, 2)
	go func() { ended <- srv.Serve(service) }()
	defer func() {
		_ = svc.Close() // ends watches, so that the server can stop
		stopWithin(srv, 5*time.Second)
	}()

	web := &http.Server{Handler: pages(svc), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute}
	webAddr := ""
	if !cfg.HTTP.Listen.Off() {
		l, err := net.Listen(cfg.HTTP.Listen.Network, cfg.HTTP.Listen.Address)
		if err != nil {
			return fmt.Errorf("http.listen: %w", err)
		}
		webAddr = l.Addr().String()
		go func() { ended <- web.Serve(l) }()
		defer web.Close()
	}
	log.Info("ready", "service", service.Addr().String(), "http", webAddr)

	for {
		select {
		case <-ctx.Done():
			log.Info("stopping")
			alive.Shutdown()
			return nil
		case err := <-ended:
			return fmt.Errorf("serving: %w", err)
		case <-reload:
			next, faults := config.LoadBizd(file)
			if len(faults) > 0 {
				log.Error("configuration not taken", "fault", faults[0].String(), "more", len(faults)-1)
				continue
			}
			setLevel(level, next.Log.Level)
			if keys.Load() != nil && next.TLS.Cert != "" {
				t, err := tlsConfig(next.TLS)
				if err != nil {
					log.Error("certificates not taken; the old ones stay", "error", err)
					continue
				}
				keys.Store(t)
			}
			log.Info("configuration taken")
		}
	}
}

// options is what the configuration says about the service.
func options(cfg *config.Bizd, log *slog.Logger) bizlogic.Options {
	return bizlogic.Options{
		Dir:       cfg.DataDir,
		Compile:   bizlogic.Engine,
		Transfers: cfg.Transfers,
		Guard:     bizlogic.Guard{Share: cfg.ShrinkGuard.Share, Min: cfg.ShrinkGuard.Min, Window: cfg.ShrinkGuard.Window},
		Download: bizlogic.Download{MaxSize: cfg.Fetch.MaxSize, Timeout: cfg.Fetch.Timeout,
			PrivateAddresses: cfg.Fetch.PrivateAddresses, Files: cfg.Fetch.Files},
		Own:     bizlogic.OwnLists{Number: cfg.OwnLists.Number, MaxSize: cfg.OwnLists.MaxSize, Rules: cfg.OwnLists.Rules},
		Version: version(),
		Log:     log,
	}
}

// tlsConfig asks for a certificate of the client but takes calls without one: those need a token.
func tlsConfig(c config.ServerTLS) (*tls.Config, error) {
	cert, err := tls.LoadX509KeyPair(c.Cert, c.Key)
	if err != nil {
		return nil, fmt.Errorf("tls: %w", err)
	}
	t := &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"}, Certificates: []tls.Certificate{cert}}
	if c.ClientCA != "" {
		pem, err := os.ReadFile(c.ClientCA)
		if err != nil {
			return nil, fmt.Errorf("tls.client_ca: %w", err)
		}
		t.ClientCAs = x509.NewCertPool()
		if !t.ClientCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("tls.client_ca: %s holds no certificate", c.ClientCA)
		}
		t.ClientAuth = tls.VerifyClientCertIfGiven
	}
	return t, nil
}

// stopWithin lets calls under way end, for a while.
func stopWithin(srv *grpc.Server, d time.Duration) {
	t := time.AfterFunc(d, srv.Stop)
	defer t.Stop()
	srv.GracefulStop()
}

// pages are /metrics, /livez, /readyz and /debug/pprof.
func pages(svc *bizlogic.Service) http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), svc.Metrics())
	mux := http.NewServeMux()
	ok := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") }
	mux.HandleFunc("GET /livez", ok)
	mux.HandleFunc("GET /readyz", ok) // a service that is open is ready
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

func handler(w io.Writer, format config.LogFormat, level slog.Leveler) slog.Handler {
	o := &slog.HandlerOptions{Level: level}
	if format == config.FormatJSON {
		return slog.NewJSONHandler(w, o)
	}
	return slog.NewTextHandler(w, o)
}

func setLevel(v *slog.LevelVar, l config.LogLevel) {
	var level slog.Level
	if level.UnmarshalText([]byte(l)) == nil { // config knows no other names
		v.Set(level)
	}
}

func version() string {
	if b, ok := debug.ReadBuildInfo(); ok {
		return cmp.Or(b.Main.Version, "unknown")
	}
	return "unknown"
}
