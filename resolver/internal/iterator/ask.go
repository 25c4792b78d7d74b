package iterator

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/selection"
)

// Limits and times of one step.
const (
	// maxInFlight: one server is asked at a time; when patience with it ends, another is asked while the first
	// may still answer.
	maxInFlight = 3
	// lateness is how long after patience has ended an answer is still welcome.
	lateness = 1500 * time.Millisecond
	// maxSends bounds the questions of one step.
	maxSends = 20
	// maxSecondOpinions is how many more servers are asked when one gave an answer that is believed only for
	// want of a better one.
	maxSecondOpinions = 2
	// minimisedTimeouts: some servers do not answer the type that minimised questions are of (RFC 9156
	// section 2.3), so their silence is not waited out.
	minimisedTimeouts = 3

	lameFor     = 15 * time.Minute
	servfailFor = 30 * time.Second
)

// ask asks the servers of z, one after the other, until one settles the question. The error is a *Failure.
func (r *run) ask(z *cut, name dnsname.Name, typ uint16, minimised bool) (response, error) {
	if z.pool != nil {
		return r.forward(z, name, typ)
	}
	if res, ok := r.askLocal(z, name, typ); ok {
		return res, nil
	}
	if !z.static {
		if !r.it.loads.enter(z.name, r.now) {
			text := fmt.Sprintf("%v %s: too many questions are under way at servers of %v", name, dnswire.TypeText(typ), z.name)
			return response{}, &Failure{Code: edeNoReachable, Text: text, final: true, shed: true}
		}
	}
	s := step{r: r, z: z, name: name, typ: typ, minimised: minimised, secure: r.secureZone(z.name)}
	s.results = make(chan result, maxInFlight)
	s.end = r.tree.Deadline
	defer s.stop()
	if !z.static {
		defer func() { r.it.loads.leave(z.name, s.timeouts > 0 && !s.answered, clock.Elapsed()) }()
	}
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		if s.waiting == nil && s.inFlight < maxInFlight {
			// Servers that stay silent after two questions each are not worth a third while there are others
			// to be found.
			var a *attempt
			if s.answered || s.timeouts < 2*len(z.servers) || !r.hasNames(z) {
				a = s.next()
			}
			if a == nil && (s.inFlight == 0 || !s.answered && r.hasNames(z)) && s.fallback == nil && !s.over() {
				found, err := r.more(z, s.answered)
				if err != nil {
					return response{}, err
				}
				if found {
					continue
				}
				a = s.lastResort()
			}
			if a != nil {
				s.send(a)
				timer.Reset(a.patience)
			} else if s.inFlight == 0 {
				return s.conclude()
			}
		}
		if left := s.left(); left <= 0 || minimised && s.timeouts >= minimisedTimeouts {
			return s.conclude()
		} else if s.waiting == nil {
			timer.Reset(left)
		}
		select {
		case o := <-s.results:
			s.inFlight--
			res, settled, err := s.take(o)
			if settled || err != nil {
				return res, err
			}
		case <-timer.C:
			if s.waiting != nil {
				s.blame(s.waiting)
			}
		case <-r.ctx.Done():
			return response{}, &Failure{Code: edeOther, Text: fmt.Sprintf("%v: given up: %v", name, r.ctx.Err()), err: r.ctx.Err()}
		}
	}
}

// A step is one question to the servers of one zone. It belongs to one goroutine.
type step struct {
	r         *run
	z         *cut
	name      dnsname.Name
	typ       uint16
	minimised bool
	secure    bool // the zone is known to be Secure
	end       clock.Instant

	running  sync.WaitGroup
	results  chan result // as roomy as there are attempts in flight, so that nobody blocks on it
	inFlight int
	flying   []*attempt
	waiting  *attempt // whose answer is waited for with patience; nil: somebody else may be asked
	again    *attempt // to be made next

	sends, timeouts, opinions int
	triedTCP                  bool
	done                      map[netip.AddrPort]bool // not to be asked any more
	asked                     map[netip.AddrPort]manner
	answered                  bool // by somebody, with whatever
	fallback                  *response
	fallbackFrom              netip.AddrPort
	complaints                []string
	networkTrouble            bool
	busy                      bool // a server has too many questions outstanding already
}

// A manner is how a server is asked, when not in the usual way.
type manner struct{ noOptions, noEDNS, tcp bool }

// An attempt is one question on its way to one server.
type attempt struct {
	selection.Choice
	manner
	patience time.Duration
	sent     clock.Instant
	blamed   bool // its timeout was reported
	explores bool // it finds out whether a family of addresses works
	cancel   context.CancelFunc
	dropped  bool // cancelled in favour of the same question sent anew
}

type result struct {
	a     *attempt
	reply query.Reply
	err   error
	panic *query.Panic
}

// stop ends a step: answers to what was asked in vain are not waited for, but the goroutines are.
func (s *step) stop() {
	for _, a := range s.flying {
		a.cancel()
	}
	s.running.Wait()
	s.r.now = clock.Elapsed()
	for len(s.results) > 0 {
		if o := <-s.results; o.panic != nil {
			panic(o.panic)
		}
	}
}

func (s *step) left() time.Duration { return s.end.Sub(clock.Elapsed()) }

// over reports whether enough was tried.
func (s *step) over() bool {
	return s.sends >= maxSends || s.minimised && s.timeouts >= minimisedTimeouts ||
		s.fallback != nil && s.opinions >= maxSecondOpinions
}

// next chooses whom to ask, or returns nil if there is nobody to ask now.
func (s *step) next() *attempt {
	if s.over() || s.left() <= 0 {
		return nil
	}
	if a := s.again; a != nil {
		s.again = nil
		if s.admit(a) {
			return a
		}
	}
	now := clock.Elapsed()
	it := s.r.it
	preferred, exploring := it.preferred(s.z.servers, now)
	hasDone := func(a netip.AddrPort) bool { return s.done[a] || s.avoids(a) }
	hasAsked := func(a netip.AddrPort) bool {
		_, asked := s.asked[a]
		return asked || hasDone(a)
	}
	for {
		// First those not asked yet; then again those that may have lost a packet.
		c, ok := it.opts.Servers.Pick(now, s.z.name, preferred, hasAsked)
		for _, skip := range []func(netip.AddrPort) bool{hasAsked, hasDone} {
			if !ok && len(preferred) < len(s.z.servers) {
				c, ok = it.opts.Servers.Pick(now, s.z.name, s.z.servers, skip)
			}
			if !ok {
				c, ok = it.opts.Servers.Pick(now, s.z.name, preferred, hasDone)
			}
		}
		if !ok {
			return nil
		}
		a := &attempt{Choice: c, manner: s.asked[c.Server], patience: c.Patience}
		if exploring && slices.Contains(preferred, c.Server) && a.patience > explorePatience {
			a.patience, a.Hurried, a.explores = explorePatience, true, true
		}
		a.noEDNS = a.noEDNS || c.NoEDNS
		a.noOptions = a.noOptions || c.NoOptions
		a.tcp = a.tcp || c.TCP
		if s.admit(a) {
			return a
		}
	}
}

// lastResort returns one attempt over TCP, when UDP brought nothing from anybody: some networks lose it all.
func (s *step) lastResort() *attempt {
	if s.triedTCP || s.answered || s.minimised || s.over() || s.timeouts < 2 || len(s.z.servers) == 0 {
		return nil
	}
	s.triedTCP = true
	a := &attempt{
		Choice:   selection.Choice{Server: s.z.servers[rand.IntN(len(s.z.servers))], Patience: lateness},
		manner:   manner{tcp: true},
		patience: lateness, blamed: true, // silence over TCP adds nothing to what UDP has shown
	}
	if !s.admit(a) {
		return nil
	}
	return a
}

// admit asks the tree whether the same question may go there again.
func (s *step) admit(a *attempt) bool {
	to := a.Server.String()
	if a.tcp {
		to += "/tcp"
	}
	if s.r.tree.Send(to, s.name, s.typ) {
		return true
	}
	s.finish(a.Server)
	return false
}

func (s *step) avoids(a netip.AddrPort) bool {
	return !s.minimised && slices.Contains(s.r.avoid, a)
}

func (s *step) finish(a netip.AddrPort) {
	if s.done == nil {
		s.done = make(map[netip.AddrPort]bool)
	}
	s.done[a] = true
}

func (s *step) complain(a netip.AddrPort, what string) {
	if len(s.complaints) < 4 {
		s.complaints = append(s.complaints, a.Addr().String()+" "+what)
	}
}

func (s *step) send(a *attempt) {
	if s.asked == nil {
		s.asked = make(map[netip.AddrPort]manner)
	}
	if _, before := s.asked[a.Server]; !before {
		s.asked[a.Server] = manner{}
	}
	o := &s.r.it.opts
	left := s.left()
	a.patience = min(a.patience, left)
	a.sent = clock.Elapsed()
	if s.fallback != nil {
		s.opinions++
	}
	s.sends++
	s.inFlight++
	s.waiting = a
	ask := query.Ask{
		Server: a.Server, Name: s.name, Type: s.typ, Class: dnswire.ClassIN,
		DO:       true,
		Case0x20: !o.NoCase0x20 && !a.NoCase && !s.secure && !a.tcp,
		NoEDNS:   a.noEDNS, NoOptions: a.noOptions, UDPSize: o.UDPSize, TCP: a.tcp,
		Timeout: min(a.patience+lateness, left),
	}
	if !s.minimised && s.r.tells(s.z.name) { // servers learn of a client's network with the whole question, or not at all
		ask.Subnet = s.r.q.Subnet
	}
	s.drop(a)
	ctx, cancel := context.WithCancel(s.r.ctx)
	a.cancel = cancel
	s.flying = append(s.flying, a)
	s.running.Add(1)
	s.r.it.crew.Go(func() {
		defer s.running.Done()
		defer cancel()
		r := result{a: a}
		defer func() {
			if v := recover(); v != nil { // it goes on where somebody recovers it, instead of ending the process
				r.panic = query.Caught(v, fmt.Sprintf("question %v %s to %v", ask.Name, dnswire.TypeText(ask.Type), ask.Server))
			}
			s.results <- r
		}()
		r.reply, r.err = o.Exchange.Ask(ctx, s.r.tree, ask)
		if r.err == nil {
			s.r.tree.Hear()
		}
	})
}

// drop ends an earlier attempt that is the same as a: one question is outstanding at a server only once
// (birthday attacks), so that the exchange would wait for the old one instead of sending anew.
func (s *step) drop(a *attempt) {
	for _, old := range s.flying {
		if old.Server == a.Server && old.manner == a.manner && !old.dropped {
			old.dropped = true
			old.cancel()
		}
	}
}

// blame holds silence against a server. It may still answer.
func (s *step) blame(a *attempt) {
	if s.waiting == a {
		s.waiting = nil
	}
	if a.blamed {
		return
	}
	a.blamed = true
	now := clock.Elapsed()
	s.timeouts++
	if !a.Hurried {
		s.r.it.opts.Servers.TimedOut(now, a.Server, a.sent)
	}
	if !a.Hurried || a.explores {
		s.r.it.familyFails(a.Server.Addr(), now)
	}
	s.complain(a.Server, "timed out")
	// Some drop what they do not understand: next time with less.
	m := s.asked[a.Server]
	switch {
	case !a.noOptions && !a.noEDNS:
		m.noOptions = true
	case !a.EDNS:
		m.noEDNS = true
	}
	s.asked[a.Server] = m
}

// take judges what came of an attempt. It returns settled if the step is over.
func (s *step) take(o result) (res response, settled bool, err error) {
	a := o.a
	if o.panic != nil {
		panic(o.panic)
	}
	defer func() {
		if v := recover(); v != nil {
			panic(query.Caught(v, fmt.Sprintf("response of %v: %+v", a.Server, o.reply.Message)))
		}
	}()
	s.flying = slices.DeleteFunc(s.flying, func(f *attempt) bool { return f == a })
	if o.err != nil {
		if a.dropped {
			return response{}, false, nil
		}
		if errors.Is(o.err, query.ErrLimit) && s.left() <= 0 {
			s.blame(a)
			return response{}, false, nil // ask sees that the time is up
		}
		if errors.Is(o.err, query.ErrLimit) && s.fallback != nil {
			res, err = s.conclude()
			return res, true, err
		}
		return response{}, false, s.takeError(a, o.err)
	}
	if s.waiting == a {
		s.waiting = nil
	}
	s.answered = true
	now := clock.Elapsed()
	servers := s.r.it.opts.Servers
	if o.reply.Joined {
		servers.Alive(now, a.Server)
	} else {
		servers.Answered(now, a.Server, o.reply.RTT)
	}
	s.r.it.familyWorks(a.Server.Addr(), now)
	if o.reply.CaseLost {
		servers.Lacking(now, a.Server, selection.LackCase)
	}
	m := o.reply.Message
	if again := s.withLess(a, m); again != nil {
		s.again = again
		return response{}, false, nil
	}
	res = classify(m, s.z.name, s.name, s.typ, false)
	if o.reply.HasScope && o.reply.Scope > 0 {
		res.subnet = s.r.q.Subnet
	}
	s.learn(a, m, res, now)
	switch res.kind {
	case kindLame:
		s.refuse(a, res.why, lameFor)
		return res, false, nil
	case kindFailed:
		d := time.Duration(0)
		if res.rcode == dnswire.RCodeServFail {
			d = servfailFor
		}
		s.refuse(a, res.why, d)
		return res, false, nil
	case kindEmpty:
		if s.minimised {
			res.kind = kindNoData
			break
		}
		s.second(a, res, "said nothing")
		return res, false, nil
	case kindReferral:
	default:
		if res.weak {
			s.second(a, res, "answered without authority")
			servers.Lame(now, a.Server, s.z.name, lameFor)
			return res, false, nil
		}
	}
	return s.accept(res, a.Server), true, nil
}

// accept notes who settled the question.
func (s *step) accept(res response, from netip.AddrPort) response {
	if !s.minimised && res.kind != kindReferral && !slices.Contains(s.r.out.Servers, from) {
		s.r.out.Servers = append(s.r.out.Servers, from)
	}
	return res
}

func (s *step) takeError(a *attempt, err error) error {
	if s.waiting == a {
		s.waiting = nil
	}
	switch {
	case errors.Is(err, query.ErrLimit):
		return &Failure{Code: edeOther, Text: fmt.Sprintf("%v: %v", s.name, err), err: err}
	case s.r.ctx.Err() != nil:
		return &Failure{Code: edeOther, Text: fmt.Sprintf("%v: given up: %v", s.name, err), err: s.r.ctx.Err()}
	case errors.Is(err, query.ErrTruncated):
		s.complain(a.Server, "truncated its response and gave no whole one over TCP") // it is there, whatever TCP came to
	case errors.Is(err, query.ErrTimeout):
		s.blame(a)
		return nil
	case errors.Is(err, query.ErrUnreachable):
		now := clock.Elapsed()
		if noRoute(err) { // which is not the server's fault
			s.r.it.familyGone(a.Server.Addr(), now)
		} else {
			s.r.it.opts.Servers.TimedOut(now, a.Server, a.sent)
			s.r.it.familyFails(a.Server.Addr(), now)
		}
		s.complain(a.Server, "is unreachable")
	case errors.Is(err, query.ErrBusy):
		s.complain(a.Server, "is busy with other questions")
		s.busy = true
		s.finish(a.Server)
		return nil
	case errors.Is(err, query.ErrMalformed):
		s.complain(a.Server, "sent a malformed message")
	default:
		s.complain(a.Server, "could not be asked: "+err.Error())
	}
	s.networkTrouble = true
	s.finish(a.Server)
	return nil
}

// noRoute reports whether this host itself has no way to an address.
func noRoute(err error) bool {
	return errors.Is(err, syscall.ENETUNREACH) || errors.Is(err, syscall.EADDRNOTAVAIL) || errors.Is(err, syscall.EAFNOSUPPORT)
}

// withLess returns the same question with less EDNS, if the response may be due to EDNS (RFC 6891
// section 6.2.2): an error without OPT, from a server that never showed that it understands EDNS.
func (s *step) withLess(a *attempt, m *query.Message) *attempt {
	if a.noEDNS || a.EDNS && m.RCode != dnswire.RCodeFormErr {
		return nil
	}
	less := a.manner
	switch m.RCode {
	case dnswire.RCodeFormErr:
		switch {
		case !a.noOptions:
			less.noOptions = true
		case !a.EDNS && !m.EDNS:
			less.noEDNS = true
		default:
			return nil
		}
	case dnswire.RCodeNotImp, dnswire.RCodeServFail, dnswire.RCodeBadVers:
		if m.EDNS && m.RCode != dnswire.RCodeBadVers {
			return nil
		}
		less.noEDNS = true
	default:
		return nil
	}
	s.asked[a.Server] = less
	c := *a
	c.manner, c.blamed = less, false
	return &c
}

// learn tells the selector what the response shows of the server's abilities.
func (s *step) learn(a *attempt, m *query.Message, res response, now clock.Instant) {
	if res.kind == kindLame || res.kind == kindFailed {
		return
	}
	servers := s.r.it.opts.Servers
	switch {
	case m.EDNS && !a.Choice.EDNS:
		servers.Able(now, a.Server, selection.LackEDNS)
	case a.noEDNS && !a.NoEDNS: // it would not answer with EDNS just now
		servers.Lacking(now, a.Server, selection.LackEDNS)
	}
	switch {
	case a.noOptions && !a.NoOptions && !a.noEDNS:
		servers.Lacking(now, a.Server, selection.LackOptions)
	case !a.noOptions && !a.noEDNS && a.Doubted && m.EDNS:
		servers.Able(now, a.Server, selection.LackOptions)
	}
	if a.tcp && !a.TCP {
		servers.Lacking(now, a.Server, selection.LackUDP)
	}
	if a.Choice.Lame && !res.weak {
		servers.Serves(a.Server, s.z.name)
	}
}

func (s *step) refuse(a *attempt, why string, lameFor time.Duration) {
	if lameFor > 0 {
		s.r.it.opts.Servers.Lame(clock.Elapsed(), a.Server, s.z.name, lameFor)
	}
	s.complain(a.Server, why)
	s.finish(a.Server)
}

// second keeps a response to fall back on.
func (s *step) second(a *attempt, res response, what string) {
	s.complain(a.Server, what)
	s.finish(a.Server)
	if s.fallback == nil || res.worth() > s.fallback.worth() {
		s.fallback, s.fallbackFrom = &res, a.Server
	}
}

// worth orders responses to fall back on.
func (r *response) worth() int {
	switch {
	case r.kind == kindAnswer || r.kind == kindAlias:
		return 3
	case !r.weak:
		return 2
	case r.kind != kindEmpty:
		return 1
	}
	return 0
}

// conclude ends a step that nobody settled.
func (s *step) conclude() (response, error) {
	if f := s.fallback; f != nil {
		if f.kind != kindEmpty {
			return s.accept(*f, s.fallbackFrom), nil
		}
		if !f.weak || s.typ == dnswire.TypeDS {
			f.kind, f.bare = kindNoData, !f.weak
			return s.accept(*f, s.fallbackFrom), nil
		}
	}
	f := &Failure{Code: edeNoReachable, shed: s.busy && !s.answered && s.timeouts == 0}
	if s.networkTrouble {
		f.Code = edeNetwork
	}
	what := "no server to ask"
	if len(s.complaints) > 0 {
		what = strings.Join(s.complaints, ", ")
	}
	f.Text = fmt.Sprintf("%v %s at servers of %v: %s", s.name, dnswire.TypeText(s.typ), s.z.name, what)
	if s.r.left() <= 0 {
		f.final = true
		if s.timeouts < minimisedTimeouts {
			f.err = context.DeadlineExceeded // the time went elsewhere; it says little of these servers
		}
	}
	return response{}, f
}
