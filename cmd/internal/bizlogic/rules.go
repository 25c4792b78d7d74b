package bizlogic

import (
	"bytes"
	"context"
	"crypto/sha256"
	"os"
	"unicode/utf8"

	bolt "go.etcd.io/bbolt"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

const (
	// maxRules is the longest text of own rules; maxInline the longest that stays in the record.
	maxRules  = 1 << 20
	maxInline = 32 << 10
	// maxRuleCount is how many own rules one target may have: every resolver that serves it compiles them when
	// it asks, and what is longer is a list.
	maxRuleCount = 20_000

	maxComplaints = 1000
)

func (a policyServer) GetRules(_ context.Context, req *adminv1.GetRulesRequest) (*adminv1.GetRulesResponse, error) {
	t, err := parseTarget(req.GetTarget())
	if err != nil {
		return nil, err
	}
	resp := new(adminv1.GetRulesResponse)
	var rules *userv1.Rules
	err = a.s.db.View(func(tx *bolt.Tx) error {
		o, err := (&view{tx: tx}).owner(t)
		if err != nil {
			return err
		}
		resp.Revision, rules = o.revision, *o.rules
		return nil
	})
	if err != nil {
		return nil, reading(err)
	}
	if sum := rules.GetSha256(); len(sum) > 0 {
		if resp.Text, err = os.ReadFile(a.s.blobPath(sum)); err != nil {
			return nil, reading(err)
		}
	} else {
		resp.Text = rules.GetText()
	}
	return resp, nil
}

func (a policyServer) SetRules(ctx context.Context, req *adminv1.SetRulesRequest) (*adminv1.SetRulesResponse, error) {
	t, err := parseTarget(req.GetTarget())
	if err != nil {
		return nil, err
	}
	text := bytes.ReplaceAll(req.GetText(), []byte("\r\n"), []byte("\n"))
	if len(text) > maxRules {
		return nil, invalid("text", "has %d bytes; at most %d", len(text), maxRules)
	}
	if !utf8.Valid(text) {
		return nil, invalid("text", "is not UTF-8")
	}
	report, err := a.s.opts.Compile(req.GetTarget(), bytes.NewReader(text))
	if err != nil {
		return nil, invalid("text", "%v", err)
	}
	if report.Rules > maxRuleCount {
		return nil, invalid("text", "has %d rules; at most %d are possible, and more of them as a list (own_lists)", report.Rules, maxRuleCount)
	}
	resp := &adminv1.SetRulesResponse{Dataset: t.dataset(), Rules: uint32(report.Rules), Complaints: showComplaints(report, maxComplaints)}
	if report.Skipped > 0 && !req.GetKeepGood() || req.GetDryRun() {
		return resp, nil
	}
	if report.Skipped > 0 {
		if text, err = withoutLines(text, report); err != nil {
			return nil, err
		}
	}
	rules, err := a.s.makeRules(text, report.Rules)
	if err != nil {
		return nil, err
	}
	resp.Revision, err = a.s.changeOwner(ctx, t, req.GetIfRevision(), func(_ *view, o *owner) error {
		*o.rules = rules
		return nil
	})
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// makeRules puts a text in the record if it is short, and beside it if not.
func (s *Service) makeRules(text []byte, n int) (*userv1.Rules, error) {
	if len(text) == 0 {
		return nil, nil
	}
	if len(text) <= maxInline {
		return &userv1.Rules{Body: &userv1.Rules_Text{Text: text}, Rules: uint32(n)}, nil
	}
	if err := s.putBlob(text); err != nil {
		return nil, storing(err)
	}
	sum := sha256.Sum256(text)
	return &userv1.Rules{Body: &userv1.Rules_Sha256{Sha256: sum[:]}, Size: uint64(len(text)), Rules: uint32(n)}, nil
}

// withoutLines drops the lines complained about.
func withoutLines(text []byte, r Report) ([]byte, error) {
	if len(r.Complaints) < r.Skipped {
		return nil, invalid("text", "%d lines cannot be used, and only %d are known by number; correct those first", r.Skipped, len(r.Complaints))
	}
	bad := map[int]bool{}
	for _, c := range r.Complaints {
		bad[c.Line] = true
	}
	var out []byte
	n := 0
	for line := range bytes.Lines(text) {
		if n++; !bad[n] {
			out = append(out, line...)
		}
	}
	return out, nil
}

func showComplaints(r Report, most int) []*adminv1.Complaint {
	var out []*adminv1.Complaint
	for _, c := range r.Complaints[:min(len(r.Complaints), most)] {
		out = append(out, &adminv1.Complaint{Line: uint32(c.Line), Text: cut(c.Text, 200), What: cut(c.What, 500)})
	}
	return out
}

// cut shortens text to at most n bytes, and makes it UTF-8.
func cut(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return string(bytes.ToValidUTF8([]byte(s), []byte("?")))
}
