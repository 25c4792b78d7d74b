// Package bizlogic is the reference business-logic service: users, their devices, shared policies and
// filter lists, and the change feed by which resolvers follow them.
//
// It serves proto/admin/v1 (all services but ResolverService) and proto/sync/v1 from one bbolt file and a
// folder of blobs, both in Options.Dir:
//
//	store.db              datasets users, catalogue, config, secrets; see store.go for the layout
//	store.db.generation   tells the file from a restored or copied one; see identity.go
//	blobs/HH/HASH         texts of lists and long rules, by SHA-256
//	exports/HASH          segments of the newest export
//
// Every change is one commit with one revision; commits of all datasets draw from one sequence, and those
// that arrive together share an fsync. A call that changes something returns when its change is on disk.
// Readers never wait for writers: a read is a short bbolt transaction, or a look at the tree in memory.
//
// Errors are gRPC status errors with the codes that proto/admin/v1 and proto/sync/v1 promise; a bad field
// is named in google.rpc.BadRequest. Open returns *StoreError when the file is not ours, too new, locked or
// damaged, and leaves it as it is.
//
// It does not compile rules (Options.Compile does), does not listen (the caller owns the gRPC server), and
// does not run on more than one node.
package bizlogic

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
)

// The kinds of dataset, in the order in which they are listed.
const (
	Users     = "users"
	Catalogue = "catalogue"
	Config    = "config"
	Secrets   = "secrets"
)

// maxCompiling is how many lists are compiled at once: each takes a core for a second or so.
const maxCompiling = 2

var kinds = []string{Users, Catalogue, Config, Secrets}

// Options sets a Service up. Every zero field but Dir means the default stated on it.
type Options struct {
	// Dir is the data folder. It is made, with mode 0700, if it does not exist.
	Dir string

	// Compile judges a text of filtering rules; name says whose for messages. Nil accepts every line of
	// text and counts those that are neither blank nor comments.
	Compile func(name string, text io.Reader) (Report, error)

	// Transfers is how many nodes may take bulk data at once. Zero means 4.
	Transfers int

	// Guard is the shrink guard of what is written here.
	Guard Guard

	// Download bounds the fetching of lists.
	Download Download

	// Own bounds the lists that users have of their own.
	Own OwnLists

	// Version of the program, for status. Empty is fine.
	Version string

	// Log receives what happens in the background. Nil discards it.
	Log *slog.Logger

	noSync bool // tests that do not lose power need not wait for the disk
}

// A Report is what a rule compiler says about a text.
type Report struct {
	Title      string      // what the text calls itself; empty if it does not
	Rules      int         // usable rules
	Skipped    int         // lines that are neither rule, comment nor blank
	Complaints []Complaint // about skipped lines, in order; may be cut short
	// NotList is why the text cannot be a list for many users, though a user may have such rules of his own:
	// a rule of it blocks the world, or it is no list at all. Empty: it can.
	NotList string
}

// A Complaint is a line that cannot be used.
type Complaint struct {
	Line int // from 1
	Text string
	What string
}

// A Service is the business-logic service on one store. It is safe for concurrent use.
type Service struct {
	opts Options
	log  *slog.Logger
	db   *storeFile

	datasets     map[string]*dataset
	ops          chan *op
	flushing     chan struct{} // holds one token when a dataset has something to flush
	admission    *admission
	downloads    *downloader
	compiling    chan struct{} // one token for each list that is being compiled
	compilingOwn chan struct{} // one if it is a user's
	exports      *exporter
	watches      sync.Map // *watch → struct{}, for status
	proposals    proposals

	ctx    context.Context // ends at Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
	closed sync.Once
	err    error // of Close
}

// Open opens the store in o.Dir, or makes one, and starts what runs behind a Service. The caller closes it.
func Open(o Options) (*Service, error) {
	if o.Dir == "" {
		return nil, errors.New("bizlogic: no data folder given")
	}
	if o.Transfers <= 0 {
		o.Transfers = 4
	}
	if o.Compile == nil {
		o.Compile = countLines
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.Guard, o.Own = o.Guard.withDefaults(), o.Own.withDefaults()
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the data folder: %w", err)
	}
	db, err := openStore(o.Dir, clock.Wall())
	if err != nil {
		return nil, err
	}
	db.NoSync = o.noSync
	if err := clearIncoming(o.Dir); err != nil {
		o.Log.Warn("removing texts that were never whole", "error", err)
	}
	if db.note != "" {
		o.Log.Warn(db.note, "lineage", fmt.Sprintf("%x", db.lineage))
	}
	if db.unsettled != nil {
		o.Log.Error("the store cannot be written; what is in it is served, and changes are refused until it can", "error", db.unsettled)
	}
	s := &Service{
		opts:         o,
		log:          o.Log,
		db:           db,
		datasets:     map[string]*dataset{},
		ops:          make(chan *op, maxGroup),
		flushing:     make(chan struct{}, 1),
		admission:    newAdmission(o.Transfers),
		downloads:    newDownloader(o.Download),
		compiling:    make(chan struct{}, maxCompiling),
		compilingOwn: make(chan struct{}, 1),
		proposals:    proposals{users: map[string]*proposalQuota{}},
	}
	s.exports = newExporter(s)
	for _, kind := range kinds {
		d, err := loadDataset(db, kind)
		if err != nil {
			return nil, errors.Join(err, db.close())
		}
		s.datasets[kind] = d
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	for _, run := range []func(){s.writeLoop, s.flushLoop, s.housekeepingLoop} {
		s.wg.Go(run)
	}
	for _, refresh := range []func(time.Time) error{s.refreshDue, s.refreshOwnDue} {
		s.wg.Go(func() { s.refreshLoop(refresh) })
	}
	return s, nil
}

// Register offers the service's gRPC services on a server.
func (s *Service) Register(r grpc.ServiceRegistrar) {
	syncv1.RegisterSyncServiceServer(r, syncServer{s: s})
	syncv1.RegisterSegmentServiceServer(r, segmentServer{s: s})
	adminv1.RegisterUserServiceServer(r, userServer{s: s})
	adminv1.RegisterPolicyServiceServer(r, policyServer{s: s})
	adminv1.RegisterListServiceServer(r, listServer{s: s})
	adminv1.RegisterCatalogueServiceServer(r, entryServer{s: s})
	adminv1.RegisterDataServiceServer(r, dataServer{s: s})
	adminv1.RegisterTokenServiceServer(r, tokenServer{s: s})
}

// Close ends watches and background work, finishes the commit under way and closes the file. Close it
// before stopping a gRPC server gracefully, since watches do not end by themselves.
func (s *Service) Close() error {
	s.closed.Do(func() {
		s.cancel()
		s.wg.Wait()
		s.err = s.db.close()
	})
	return s.err
}

// Head returns the newest revision of a dataset; 0 if there is no such kind.
func (s *Service) Head(kind string) uint64 {
	d := s.datasets[kind]
	if d == nil {
		return 0
	}
	head, _ := d.position()
	return head
}

// housekeepingLoop forgets what is only kept for a while: tombstones, imports, tickets, unused blobs.
func (s *Service) housekeepingLoop() {
	t := time.NewTicker(time.Hour)
	defer t.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-t.C:
		}
		if err := s.forgetOld(); err != nil {
			s.log.Error("housekeeping", "error", err)
		}
	}
}

// countLines is the compiler of those who have none.
func countLines(_ string, text io.Reader) (r Report, err error) {
	in := bufio.NewReader(text)
	for {
		line, err := in.ReadBytes('\n')
		if line = bytes.TrimSpace(line); len(line) > 0 && line[0] != '#' && line[0] != '!' {
			r.Rules++
		}
		if err == io.EOF {
			return r, nil
		}
		if err != nil {
			return r, err
		}
	}
}
