package admin

import (
	"encoding/json"
	"log"
	"log/slog"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// HTTPOptions are what the pages show. All but Logger are needed.
type HTTPOptions struct {
	// Readiness is /readyz.
	Readiness func() Readiness
	// Live is /livez: an error if the process no longer serves its loop. Nil never errs.
	Live func() error
	// Metrics is /metrics.
	Metrics prometheus.Gatherer
	// Logger is told what the server complains of. Nil means slog.Default.
	Logger *slog.Logger
}

// NewHTTPServer returns the server of the pages /livez, /readyz, /metrics and /debug/pprof, with limits on
// what a client may send and on how long it may take. The caller serves and closes it.
func NewHTTPServer(o HTTPOptions) *http.Server {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	return &http.Server{
		Handler:           NewHandler(o),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      2 * time.Minute, // a CPU profile takes 30 s unless told otherwise
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          log.New(logWriter{o.Logger}, "", 0),
	}
}

// NewHandler returns the pages alone.
func NewHandler(o HTTPOptions) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) {
		if o.Live != nil {
			if err := o.Live(); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
		}
		w.Header().Set("Cache-Control", "no-store")
		_, _ = w.Write([]byte("ok\n")) // who went away does not wait for it
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		r := o.Readiness()
		body, err := json.Marshal(r)
		if err != nil { // a NaN in Degraded, say
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		if !r.Ready {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_, _ = w.Write(append(body, '\n'))
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(o.Metrics, promhttp.HandlerOpts{
		MaxRequestsInFlight: 8,
		Timeout:             20 * time.Second,
		ErrorHandling:       promhttp.ContinueOnError, // one bad metric must not hide the others
	}))
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("POST /debug/pprof/symbol", pprof.Symbol) // many addresses come by POST
	return http.MaxBytesHandler(mux, maxMessage)
}

// logWriter passes what net/http complains of to a logger.
type logWriter struct{ to *slog.Logger }

func (w logWriter) Write(b []byte) (int, error) {
	w.to.Debug("http", "message", string(b))
	return len(b), nil
}
