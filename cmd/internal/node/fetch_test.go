package node

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/miekg/dns"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

// A standalone resolver finds the servers of lists by itself: from the first moment on, whatever policies say of their
// names, and from local data too. Where it cannot, it says why.
func TestListsAreFoundByTheResolverItself(t *testing.T) {
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "||ads.example^\n") }))
	defer site.Close()
	_, port, _ := net.SplitHostPort(site.Listener.Addr().String())

	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	upstream := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		switch name := strings.ToLower(q.Question[0].Name); {
		case name == "broken.example.":
			m.Rcode = dns.RcodeServerFailure
		case name == "nowhere.example.":
			m.Rcode = dns.RcodeNameError
		case q.Question[0].Qtype == dns.TypeA:
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.IPv4(127, 0, 0, 1)}}
		}
		_ = w.WriteMsg(m)
	})}
	ended := make(chan error, 1)
	go func() { ended <- upstream.ActivateAndServe() }()
	defer func() {
		if err := upstream.Shutdown(); err != nil {
			t.Error(err)
		}
		<-ended
	}()

	dir := t.TempDir()
	write(t, dir, "rpz.zone", "lists.example CNAME .\n*.example CNAME .\n")
	c := configured(t, dir, fmt.Sprintf(`
dnssec: { validate: false }
forward_zones: [{ name: ".", upstreams: [{ url: "udp://%s" }] }]
policy_zones: [{ name: rpz, file: rpz.zone }]
local_data:
  - { name: lists.home.arpa, records: ["A 127.0.0.1"] }
  - { name: alias.home.arpa, records: ["CNAME lists.example."] }
fetch: { private_addresses: true }
`, pc.LocalAddr()))
	n, err := Start(c, Options{Version: "test", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	run(t, n)
	ctx := t.Context()
	conn, err := grpc.NewClient("passthrough:///standalone", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(n.service.dial))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	lists, policies := adminv1.NewListServiceClient(conn), adminv1.NewPolicyServiceClient(conn)
	add := func(id, host string) error {
		s, err := lists.AddList(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Send(&adminv1.AddListRequest{Part: &adminv1.AddListRequest_Header_{Header: &adminv1.AddListRequest_Header{Id: id, Url: "http://" + host + ":" + port + "/list"}}}); err != nil {
			t.Fatal(err)
		}
		_, err = s.CloseAndRecv()
		return err
	}
	for i, host := range []string{"lists.example", "lists.home.arpa", "alias.home.arpa", "localhost", "LISTS.example."} {
		if err := add(fmt.Sprintf("list%d", i), host); err != nil {
			t.Errorf("%s: %v", host, err)
		}
	}
	for host, says := range map[string]string{
		"broken.example":                     "resolving broken.example: ",
		"nowhere.example":                    "nowhere.example has no address",
		strings.Repeat("a", 64) + ".example": "resolving aaa",
		"lists.example.invalid":              "lists.example.invalid",
	} {
		if err := add("bad", host); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v; want something of %q", host, err, says)
		}
	}
	// A user who blocks the server has lists from it all the same.
	if _, err := adminv1.NewUserServiceClient(conn).CreateUser(ctx, &adminv1.CreateUserRequest{Id: "ann"}); err != nil {
		t.Fatal(err)
	}
	if _, err := policies.SetRules(ctx, &adminv1.SetRulesRequest{Target: "ann", Text: []byte("||example^\n")}); err != nil {
		t.Fatal(err)
	}
	if _, err := policies.SetSettings(ctx, &adminv1.SetSettingsRequest{Target: "ann", Assignments: []*adminv1.Assignment{
		{Key: "own_lists", Operation: adminv1.Operation_OPERATION_ADD, Value: "mine=http://own.example:" + port + "/"}}}); err != nil {
		t.Error(err)
	}
	// Clients do hear what policies say.
	if m := ask(t, n, "lists.example.", dns.TypeA); m.Rcode != dns.RcodeNameError {
		t.Error(m)
	}
}
