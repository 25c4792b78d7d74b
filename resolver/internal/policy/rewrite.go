package policy

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/filter"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// A rewriteSet finds the rewrite of a name: an exact one before the closest wildcard.
type rewriteSet struct {
	exact, below map[dnsname.Name]*rewrite
	bytes        int64 // of memory, roughly
}

// A rewrite answers a name with given data.
type rewrite struct {
	name   string // as it was written
	text   string // for explanations
	target dnsname.Name
	flat   bool // the target's data is given to the name itself
	rcode  uint16
	ttl    uint32
	anyTTL bool                    // it states none: ttl is that of whoever had it compiled
	bytes  int64                   // of records
	synths map[uint16]*query.Synth // by type
	empty  *query.Synth            // NODATA, or the RCODE
}

// newRewriteSet compiles rewrites; ttl is for those without one of their own, unless verdict is given another. Those
// that cannot be used were refused when they were stored; here they are left out.
func newRewriteSet(rs []usercache.Rewrite, flat bool, ttl uint32) rewriteSet {
	var s rewriteSet
	for _, r := range rs {
		anyTTL := r.TTL == 0
		if anyTTL {
			r.TTL = ttl
		}
		r.TTL = min(r.TTL, 1<<31-1) // the most there is (RFC 2181 section 8)
		c := &rewrite{name: r.Name, text: r.Name + " " + strings.Join(r.Records, ", "), flat: flat, ttl: r.TTL, anyTTL: anyTTL, synths: make(map[uint16]*query.Synth)}
		for _, rec := range r.Records {
			c.add(rec)
		}
		c.empty = &query.Synth{RCode: c.rcode, TTL: r.TTL}
		name, wild := strings.CutPrefix(r.Name, "*.")
		n, err := dnsname.Parse(name)
		if err != nil {
			continue
		}
		to := &s.exact
		if wild {
			to = &s.below
		}
		if *to == nil {
			*to = make(map[dnsname.Name]*rewrite)
		}
		(*to)[n] = c
		s.bytes += 400 + 2*int64(len(c.text)) + c.bytes
	}
	return s
}

func (r *rewrite) add(rec string) {
	switch strings.ToUpper(strings.TrimSpace(rec)) {
	case "NXDOMAIN":
		r.rcode = dnswire.RCodeNXDomain
		return
	case "REFUSED":
		r.rcode = dnswire.RCodeRefused
		return
	case "NODATA":
		return
	}
	rs, err := dnswire.ParseRecords(". "+rec+"\n", ".", "rewrite", r.ttl)
	if err != nil || len(rs) != 1 {
		return
	}
	d := rs[0]
	if d.Type == dnswire.TypeCNAME {
		dnsname.Fold(d.Data, d.Data)
		r.target = dnsname.Name(d.Data)
		return
	}
	r.bytes += int64(len(d.Data)) + 16
	s := r.synths[d.Type]
	if s == nil {
		s = &query.Synth{TTL: r.ttl, RRs: []query.RRset{{Type: d.Type, Class: dnswire.ClassIN, TTL: r.ttl}}}
		r.synths[d.Type] = s
	}
	s.RRs[0].Data = query.AppendRData(s.RRs[0].Data, d.Data)
}

func (s *rewriteSet) find(n dnsname.Name) *rewrite {
	if r := s.exact[n]; r != nil {
		return r
	}
	if len(s.below) > 0 {
		for p := n.Parent(); p != ""; p = p.Parent() {
			if r := s.below[p]; r != nil {
				return r
			}
		}
	}
	return nil
}

// verdict applies the rewrite to a question of the given type. A type it has no records of is empty: the name is
// the user's now, and what others say of it would lead past the rewrite. A name that points at itself is no
// rewrite, but keeps a wildcard's away. ttl is for a rewrite that states none: users of one shared policy share what is
// compiled of it, and not their TTLs.
func (r *rewrite) verdict(typ uint16, n dnsname.Name, why query.Why, ttl uint32) query.Verdict {
	v := query.Verdict{Why: why}
	if !r.anyTTL {
		ttl = r.ttl
	}
	v.Block.TTL = time.Duration(ttl) * time.Second
	switch {
	case r.target == n:
		return query.Verdict{}
	case r.target != "":
		v.Target, v.Kind = r.target, query.Redirected
		if r.flat {
			v.Kind = query.Flattened
		}
	case r.rcode == 0 && r.synths[typ] != nil:
		v.Kind, v.Synth = query.Synthesised, r.synths[typ]
	default:
		v.Kind, v.Synth = query.Synthesised, r.empty
	}
	if v.Synth != nil && ttl != r.ttl {
		v.Synth = withTTL(v.Synth, ttl)
	}
	return v
}

// withTTL is a copy with another TTL.
func withTTL(s *query.Synth, ttl uint32) *query.Synth {
	c := *s
	c.TTL, c.RRs = ttl, slices.Clone(s.RRs)
	for i := range c.RRs {
		c.RRs[i].TTL = ttl
	}
	return &c
}

// rewritten turns a $dnsrewrite result into a verdict.
func rewritten(m *filter.Matcher, r *filter.Result, v query.Verdict, name dnsname.Name, typ uint16, ttl uint32) query.Verdict {
	a := m.Rewrite(r, typ)
	switch {
	case a.Action == filter.Drop:
		v.Kind = query.Dropped
	case a.Action == filter.TCPOnly:
		v.Kind = query.Truncated
	case a.CNAME != "":
		n, err := dnsname.Parse(a.CNAME)
		if err != nil {
			return v
		}
		if n.IsWildcard() { // the name below it
			if n = n.Parent(); name.IsWithin(n) {
				return v // it is there already
			}
			if n, err = name.Replace(dnsname.Root, n); err != nil { // too long to be a name
				v.Kind, v.Synth = query.Synthesised, &query.Synth{RCode: dnswire.RCodeYXDomain, TTL: ttl}
				return v
			}
		}
		v.Kind, v.Target, v.Block.TTL = query.Redirected, n, time.Duration(ttl)*time.Second
	case a.RCode != 0 || len(a.Data) == 0:
		v.Kind, v.Synth = query.Synthesised, &query.Synth{RCode: a.RCode, TTL: ttl}
	default:
		set := query.RRset{Type: typ, Class: dnswire.ClassIN, TTL: ttl}
		for _, d := range a.Data {
			if typ == dnswire.TypeTXT { // the value is the text, not its presentation form
				set.Data = query.AppendRData(set.Data, textData(d))
				continue
			}
			rs, err := dnswire.ParseRecords(". "+dnswire.TypeText(typ)+" "+d+"\n", ".", "rule", ttl)
			if err == nil && len(rs) == 1 {
				set.Data = query.AppendRData(set.Data, rs[0].Data)
			}
		}
		v.Kind, v.Synth = query.Synthesised, &query.Synth{TTL: ttl, RRs: []query.RRset{set}}
	}
	return v
}

// textData is a text as RDATA of a TXT record: strings of at most 255 bytes.
func textData(s string) []byte {
	var b []byte
	for {
		n := min(len(s), 255)
		b = append(append(b, byte(n)), s[:n]...)
		if s = s[n:]; s == "" {
			return b
		}
	}
}

// addressSynth answers with the addresses of hosts lines.
func addressSynth(addrs []netip.Addr, typ uint16, ttl uint32) *query.Synth {
	set := query.RRset{Type: typ, Class: dnswire.ClassIN, TTL: ttl}
	for _, a := range addrs {
		set.Data = query.AppendRData(set.Data, a.AsSlice())
	}
	return &query.Synth{TTL: ttl, RRs: []query.RRset{set}}
}
