package node

import (
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"github.com/sluice-dns/sluice/cmd/internal/config"
	"github.com/sluice-dns/sluice/resolver"
)

// Workers of one process share an address; a second process, even of the same user, is told that it is taken.
func TestASecondProcessGetsNoShareOfAnAddress(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("SO_REUSEPORT shares among all processes of a user on Linux")
	}
	limits, err := resolver.NewLiveLimits(resolver.Machine{Memory: 2 << 30, CPUs: 2}, resolver.LimitsOptions{Workers: 2})
	if err != nil {
		t.Fatal(err)
	}
	var first, second sockets
	defer first.close()
	defer second.close()
	if err := first.open(&config.Listen{UDP: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}}, limits); err != nil {
		t.Fatal(err)
	}
	if len(first.udp) != 2 {
		t.Fatalf("%d sockets for two workers", len(first.udp))
	}
	err = second.open(&config.Listen{UDP: first.addrs["udp"]}, limits)
	if err == nil || !strings.Contains(err.Error(), "listen.udp") || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("the second process: %v", err)
	}
}
