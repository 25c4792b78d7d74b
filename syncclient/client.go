package syncclient

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/usercache"
)

// New returns a client that does nothing until Run.
func New(o Options) (*Client, error) {
	if o.Cache == nil || o.DataDir == "" {
		return nil, errors.New("syncclient: Options need a Cache and a DataDir")
	}
	if len(o.Services) == 0 {
		return nil, errors.New("syncclient: no address of a service is given")
	}
	if o.Node.ID == "" {
		return nil, errors.New("syncclient: this node has no id; the service gives tickets to nodes with a name only")
	}
	if len(o.Kinds) == 0 {
		o.Kinds = usercache.Kinds
	}
	if o.StaleAfter == 0 {
		o.StaleAfter = 15 * time.Second
	}
	if o.Metrics == nil {
		o.Metrics = noMetrics{}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Rand == nil {
		o.Rand = rand.Reader
	}
	if err := os.MkdirAll(o.DataDir, 0o700); err != nil {
		return nil, fmt.Errorf("making the directory of sync state: %w", err)
	}
	c := &Client{opts: o, bulk: make(chan struct{}, 1), proposals: newProposals(), finished: make(chan struct{})}
	c.backoffs = loadBackoffs(filepath.Join(o.DataDir, "backoff.json"), o.Rand, o.Logger)
	for _, address := range o.Services {
		s, err := newService(address, &o)
		if err != nil {
			return nil, err
		}
		c.services = append(c.services, s)
	}
	var err error
	if c.blobs, err = openBlobs(c, filepath.Join(o.DataDir, "blobs"), o.KeepBlobs); err != nil {
		return nil, err
	}
	for _, kind := range o.Kinds {
		if !slices.Contains(usercache.Kinds, kind) {
			return nil, fmt.Errorf("syncclient: there is no dataset %q; there are %v", kind, usercache.Kinds)
		}
		c.followers = append(c.followers, newFollower(c, kind))
	}
	return c, nil
}

// Options sets a Client up. Cache, Services, DataDir and Node.ID are required; every other zero field means
// the default stated on it.
type Options struct {
	// Cache is what is kept current.
	Cache *usercache.Cache

	// Services are addresses of the business-logic service, tried in this order: HOST:PORT, unix:PATH, or
	// inprocess:NAME, which is plaintext and needs Dial.
	Services []string

	// TLS is used for all but unix: and inprocess: addresses; it is held to TLS 1.3. Nil means plaintext,
	// which New refuses beyond loopback.
	TLS *tls.Config

	// Dial connects to an address of Services, which it gets as given. Nil means net.Dialer.
	Dial func(ctx context.Context, address string) (net.Conn, error)

	// DataDir is where backoff and blobs are kept. It is made, for this user alone, if it does not exist.
	DataDir string

	// Node says who we are.
	Node Node

	// Kinds are the datasets to follow. Nil means all.
	Kinds []usercache.Kind

	// StaleAfter is how long after the last heartbeat at head a dataset is still fresh. Zero means 15 s.
	StaleAfter time.Duration

	// KeepBlobs is how long a blob is kept that nobody wants. Zero means 24 hours.
	KeepBlobs time.Duration

	// Metrics is told what happens. Nil means nobody is.
	Metrics Metrics

	// Logger is told what needs attention. Nil means nobody is.
	Logger *slog.Logger

	// Rand spreads waits. Nil means crypto/rand.
	Rand io.Reader
}

// A Node names a resolver to the service.
type Node struct {
	ID, Region, Version string
	// PeerAddress is where it offers segments to siblings. Empty: it does not.
	PeerAddress string
}

func (n *Node) message() *syncv1.Node {
	return &syncv1.Node{Id: n.ID, Region: n.Region, Version: n.Version, PeerAddress: n.PeerAddress}
}

// A Client follows the business-logic service. It is safe for concurrent use.
type Client struct {
	opts      Options // constant after New
	services  []*service
	followers []*follower
	blobs     *Blobs
	backoffs  *backoffs
	bulk      chan struct{} // of size one: held while a ticket is
	proposals *proposals

	mu       sync.Mutex // guards everything below; held for memory work only
	stop     context.CancelFunc
	finished chan struct{} // closed when Run has returned, or Close has come before it
	ended    bool
	notify   []chan<- struct{}
}

// ErrClosed is returned by Run after Close, or when it is called twice.
var ErrClosed = errors.New("syncclient: closed, or running already")

// Run follows the service until ctx ends or Close is called, and returns nil when all it has started has
// ended. It can be called once.
func (c *Client) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	c.mu.Lock()
	if c.ended || c.stop != nil {
		c.mu.Unlock()
		return ErrClosed
	}
	c.stop = stop
	c.mu.Unlock()

	var running sync.WaitGroup
	for _, f := range c.followers {
		running.Go(func() { f.run(ctx) })
	}
	running.Go(func() { c.blobs.run(ctx) })
	running.Go(func() { c.propose(ctx) })
	running.Wait()
	for _, s := range c.services {
		s.close()
	}
	close(c.finished)
	return nil
}

// Close ends Run and waits until it has returned. The Cache is not closed.
func (c *Client) Close() {
	c.mu.Lock()
	if c.stop == nil && !c.ended {
		close(c.finished)
	}
	c.ended = true
	if c.stop != nil {
		c.stop()
	}
	c.mu.Unlock()
	c.Wait()
}

// Wait returns when Run has.
func (c *Client) Wait() { <-c.finished }

// Blobs returns the store of blobs.
func (c *Client) Blobs() *Blobs { return c.blobs }

// Repair compares a dataset with the service's now and fetches what differs.
func (c *Client) Repair(kind usercache.Kind) error {
	f, err := c.follower(kind)
	if err != nil {
		return err
	}
	f.ask(func() { f.wanted = "an operator asked for it" })
	return nil
}

// Accept is an operator's word for what waits for one: removals that the shrink guard holds go through,
// and if the service was last found to serve another dataset or lineage, that one is taken over. Until it
// has come whole, the dataset is then cold.
func (c *Client) Accept(kind usercache.Kind) (Accepted, error) {
	f, err := c.follower(kind)
	if err != nil {
		return Accepted{}, err
	}
	a := Accepted{Removals: f.ds.AcceptShrink(wall())}
	f.ask(func() {
		if f.foreign != nil {
			a.Identity = *f.foreign
			f.accepted = f.foreign
		}
	})
	return a, nil
}

// Accepted says what an Accept let through.
type Accepted struct {
	// Removals is how many records left the serving view.
	Removals int
	// Identity is the dataset that will be taken over. Zero: none was waiting.
	Identity usercache.Identity
}

// Notify arranges that after each change of what Status says, but for the mere passing of time, something
// is sent to ch, unless it is full: a channel of size one makes a reader look again at least once after the
// last change.
func (c *Client) Notify(ch chan<- struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.notify = append(c.notify, ch)
}

func (c *Client) changed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	wakeAll(c.notify)
}

func wakeAll(channels []chan<- struct{}) {
	for _, ch := range channels {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

func (c *Client) follower(kind usercache.Kind) (*follower, error) {
	for _, f := range c.followers {
		if f.kind == kind {
			return f, nil
		}
	}
	return nil, fmt.Errorf("dataset %q is not followed", kind)
}
