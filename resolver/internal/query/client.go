package query

import "github.com/sluice-dns/sluice/usercache"

// A ClientKind is how well a client is known; limits differ by it.
type ClientKind uint8

// The kinds. A stranger's UDP queries are rate limited; a listed source is in access.allow beyond the
// default or in access.unlimited.
const (
	Stranger ClientKind = iota
	Listed
	Identified
)

// A Client is who asks. It is a value, copied once: a query sees one version of its user from start to end.
type Client struct {
	Kind ClientKind
	// Unlimited: no per-source limit applies (access.unlimited).
	Unlimited bool
	// Misnamed: the client, over an encrypted transport, gave the id of a device that nobody has or whose user is
	// disabled. It is a stranger, and its owner may not know.
	Misnamed bool
	// Profile is the user's settings as they are for this device; the zero Profile, which filters nothing,
	// for a client that nobody identified.
	Profile usercache.Profile
	// Catalogue is the state of package policy that the query is judged by from start to end.
	Catalogue any
	// Rules are the client's own rules as package policy has compiled them, held while the query lives.
	Rules any
}

// Unnamed reports whether the user's settings keep the client's address out of logs.
func (c *Client) Unnamed() bool {
	return c.Kind == Identified && c.Profile.Log < usercache.LogFull
}
