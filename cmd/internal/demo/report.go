package demo

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/miekg/dns"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

// A result is a line of "sluice demo --json".
type result struct {
	Check  string  `json:"check"`
	OK     bool    `json:"ok"`
	MS     float64 `json:"ms"`
	Detail string  `json:"detail"`
}

// A printer writes results, for people or programs. After the first error it writes nothing.
type printer struct {
	w    io.Writer
	json bool
	err  error
}

func (p *printer) printf(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format, args...)
	}
}

func (p *printer) object(v any) {
	if p.err == nil {
		p.err = json.NewEncoder(p.w).Encode(v)
	}
}

// system shows what was started.
func (p *printer) system(s *system, took time.Duration) {
	if p.json {
		return
	}
	p.printf("Sluice demo: everything runs in this process, on 127.0.0.0/8; nothing leaves this machine.\n\n")
	p.table(func(w io.Writer) {
		fmt.Fprintf(w, "  Internet\t%d authoritative servers, from a signed root down, port %d\n", len(s.internet.Addrs()), s.port)
		fmt.Fprintf(w, "  service\t%s for operators, %s for resolvers\n", s.service.operators, s.service.resolvers)
		for _, n := range s.nodes {
			fmt.Fprintf(w, "  %s\tUDP and TCP %v, DoT %v, DoH %v\n", n.name, n.addr(udp), n.addr(dot), n.addr(doh1))
		}
		fmt.Fprintf(w, "  alice\tpolicy %q (list %q, safe search at Google), a rule and a rewrite of her own\n", policyID, listName)
		fmt.Fprintf(w, "  bob\tno filtering\n")
	})
	p.printf("\nThe resolvers know who asks by:\n\n")
	p.table(func(w io.Writer) {
		fmt.Fprintf(w, "  \tUDP, TCP: SOURCE\tDoT: SERVER NAME\tDoH: PATH\n")
		for _, c := range []client{alice, bob} {
			fmt.Fprintf(w, "  %s\t%v\t%s.%s\t/dns-query/%s\n", c.name, c.source, c.device, serverName, c.device)
		}
	})
	p.printf("\nStarted in %.1f s: the list and both users came to the resolvers from the service.\n", took.Seconds())
}

// A look is a row of the table of answers: what each user got, and why alice did.
type look struct {
	name       string
	alice, bob string
	why        string
}

// tour asks resolver-1 for names that show what settings do.
func (s *system) tour(ctx context.Context) (looks []look) {
	for _, name := range []string{
		"www.shop.example.", "www.ads.example.", "banner.ads.example.", "metrics.tracker.example.", "stats.shop.example.",
		"www.google.com.", "nas.home.arpa.",
	} {
		l := look{name: strings.TrimSuffix(name, ".")}
		alias := "" // where the name leads for bob
		for _, c := range []struct {
			client
			to *string
		}{{alice, &l.alice}, {bob, &l.bob}} {
			m, err := s.ask(ctx, s.nodes[0], c.client, udp, host(name))
			if err != nil {
				*c.to = "no answer"
				continue
			}
			r := replyOf(m)
			if *c.to = r.String(); r.code >= 0 {
				*c.to = "blocked: " + *c.to
			}
			for _, rr := range m.Answer {
				if cname, ok := rr.(*dns.CNAME); ok && c.client == bob {
					alias = cname.Target
				}
			}
		}
		if l.why = s.nodes[0].explain(ctx, alice, name); strings.HasPrefix(l.alice, "blocked") && alias != "" {
			l.why += " (its alias " + strings.TrimSuffix(alias, ".") + ")"
		}
		looks = append(looks, l)
	}
	return looks
}

// explain asks a resolver why it answers a user as it does: the step that decided.
func (p *process) explain(ctx context.Context, c client, name string) string {
	got, err := adminv1.NewResolverServiceClient(p.admin).Explain(ctx, &adminv1.ExplainRequest{Target: c.name, Name: name})
	if err != nil {
		return "not explained: " + err.Error()
	}
	why := "nothing applies"
	for _, step := range got.Steps {
		if step.Verdict == "none" || step.Step == "redirect" { // that is what comes of the step before
			continue
		}
		if why = step.Step; step.List != "" && step.List != step.Step+"s" {
			why += " " + step.List
		}
		switch {
		case step.Rule != "":
			why += fmt.Sprintf(", line %d: %s", step.Line, step.Rule)
		case step.Detail != "" && step.Detail != step.Step:
			why += ": " + step.Detail
		}
	}
	return why
}

// answers shows who got what.
func (p *printer) answers(looks []look) {
	p.printf("\nThe same names, asked by both from resolver-1 and its one cache:\n\n")
	p.table(func(w io.Writer) {
		fmt.Fprintf(w, "  NAME\tALICE GETS\tBOB GETS\tWHY ALICE\n")
		for _, l := range looks {
			fmt.Fprintf(w, "  %s\t%s\t%s\t%s\n", l.name, l.alice, l.bob, l.why)
		}
	})
}

// begin announces the checks.
func (p *printer) begin() {
	if !p.json {
		p.printf("\nChecks:\n\n")
	}
}

// result shows the result of a check as it comes.
func (p *printer) result(r result) {
	if p.json {
		p.object(r)
		return
	}
	verdict := "ok  "
	if !r.OK {
		verdict = "FAIL"
	}
	p.printf("  %s  %-22s %8.1f ms  %s\n", verdict, r.Check, r.MS, r.Detail)
}

func (p *printer) total(passed, failed int) {
	if p.json {
		p.object(struct {
			Passed int `json:"passed"`
			Failed int `json:"failed"`
		}{passed, failed})
		return
	}
	p.printf("\n%d passed, %d failed\n", passed, failed)
}

// table prints what rows writes, in aligned columns.
func (p *printer) table(rows func(io.Writer)) {
	var b bytes.Buffer
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	rows(w)
	_ = w.Flush() // a bytes.Buffer takes everything
	p.printf("%s", b.String())
}

// pasteLines are command lines by which a person asks as each user.
func (s *system) pasteLines() string {
	p := s.nodes[0]
	m := new(dns.Msg)
	m.SetQuestion("www.ads.example.", typeA)
	m.Id = 0
	wire, _ := m.Pack() // a fixed question
	var b strings.Builder
	fmt.Fprintf(&b, "\nServing until interrupted (Ctrl-C), with certificates of the authority in %s:\n\n", s.caFile)
	for _, n := range s.nodes {
		fmt.Fprintf(&b, "  %s  UDP and TCP %v, DoT %v, DoH %v, admin %s\n", n.name, n.addr(udp), n.addr(dot), n.addr(doh1), n.adminAddr())
	}
	fmt.Fprintf(&b, "  service     admin %s\n", s.service.operators)
	fmt.Fprintf(&b, "\nAs the operator, with bin/sluicectl built:\n  export SLUICE_SERVICE=%s SLUICE_RESOLVER=%s\n  bin/sluicectl explain alice www.ads.example\n", s.service.operators, p.adminAddr())
	for _, c := range []client{alice, bob} {
		device := c.device + "." + serverName
		fmt.Fprintf(&b, "\nAs %s:\n", c.name)
		fmt.Fprintf(&b, "  dig @127.0.0.1 -p %d -b %v www.ads.example\n", p.addr(udp).Port(), c.source)
		fmt.Fprintf(&b, "  kdig @127.0.0.1 -p %d +tls +tls-ca=%s +tls-hostname=%s +tls-sni=%s www.ads.example\n", p.addr(dot).Port(), s.caFile, device, device)
		fmt.Fprintf(&b, "  curl -s --cacert %s --resolve %s:%d:127.0.0.1 'https://%s:%d/dns-query/%s?dns=%s' | tail -c 4 | od -An -tu1   # the last four bytes are the address\n",
			s.caFile, serverName, p.addr(doh1).Port(), serverName, p.addr(doh1).Port(), c.device, base64.RawURLEncoding.EncodeToString(wire))
	}
	b.WriteString("\n")
	return b.String()
}
