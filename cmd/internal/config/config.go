// Package config reads the configuration files of the two daemons: Load that of
// "sluice run", LoadBizd that of "sluice-bizd run".
//
// A file is YAML, at most 4 MiB, one document; an empty one and "{}" are valid,
// since every key has a default. What comes out is plain data: addresses and
// networks as netip values, times as time.Duration, sizes in bytes, shares as
// fractions of 1, choices as typed strings, domain names in lower case with the
// dot at the end, and paths of files made absolute against the folder of the
// configuration file. Ports that were left out are filled in.
//
// Reading is strict and complete: an unknown or doubled key, a wrong type, an
// impossible value, a file that cannot be read and keys that contradict each
// other are all reported, every one of them in one go, each as a Fault with its
// place and something to try. A configuration with a fault is not returned.
//
// The package opens the files that a configuration names (certificates, root
// hints, trust anchors, policy zones) to see that they can be used, and opens
// nothing else: no socket, no name is looked up. It does not judge limits
// against the machine; see resolver.LimitsFor.
package config

import (
	"net/netip"
	"os"
	"time"
)

// Load reads the configuration of "sluice run". An empty path means the
// defaults. The result is nil when there are faults.
func Load(path string) (*Sluice, []Fault) {
	c := Default()
	d := load(path, c)
	if d == nil {
		c.settle()
		return c, nil
	}
	c.settle()
	c.check(d)
	if faults := d.faults(); len(faults) > 0 {
		return nil, faults
	}
	c.source = d
	return c, nil
}

// LoadBizd is Load for "sluice-bizd run".
func LoadBizd(path string) (*Bizd, []Fault) {
	c := DefaultBizd()
	d := load(path, c)
	if d == nil {
		return c, nil
	}
	c.check(d)
	if faults := d.faults(); len(faults) > 0 {
		return nil, faults
	}
	return c, nil
}

// Sluice is the configuration of "sluice run". The field tags are the keys; a
// comment beside a field says what its key does only where the name does not.
type Sluice struct {
	DataDir      string        `yaml:"data_dir" as:"path"`
	Node         Node          `yaml:"node"`
	Listen       Listen        `yaml:"listen"`
	TLS          TLS           `yaml:"tls"`
	Access       Access        `yaml:"access"`
	Identify     Identify      `yaml:"identify"`
	Stranger     string        `yaml:"stranger" as:"policy"` // Refuse, Serve or the name of a policy
	Recursion    Recursion     `yaml:"recursion"`
	LocalData    []LocalData   `yaml:"local_data"`
	Answers      Answers       `yaml:"answers"`
	Cache        Cache         `yaml:"cache"`
	DNSSEC       DNSSEC        `yaml:"dnssec"`
	Rebinding    Rebinding     `yaml:"rebinding"`
	DNS64        DNS64         `yaml:"dns64"`
	StubZones    []StubZone    `yaml:"stub_zones"`
	ForwardZones []ForwardZone `yaml:"forward_zones"`
	PolicyZones  []PolicyZone  `yaml:"policy_zones"`
	Users        Users         `yaml:"users"`
	Fetch        Fetch         `yaml:"fetch"`     // standalone
	OwnLists     OwnLists      `yaml:"own_lists"` // standalone
	Limits       Limits        `yaml:"limits"`
	Admin        Admin         `yaml:"admin"`
	HTTP         HTTP          `yaml:"http"`
	Log          Log           `yaml:"log"`
	Testing      Testing       `yaml:"testing"`

	source *decoder // where each key stood; nil when there was no file
}

// Words with a meaning where the name of a policy may stand too.
const (
	Refuse = "refuse" // Stranger and Users.WhenCold
	Serve  = "serve"  // Stranger: answered, unfiltered
)

// Node says which resolver this is. After Load both fields are set.
type Node struct {
	ID     string `yaml:"id" as:"label"`
	Region string `yaml:"region" as:"label"`
}

// Listen holds the addresses to serve on. An empty list is off; port 0 lets the
// system choose.
type Listen struct {
	UDP               []netip.AddrPort `yaml:"udp"`
	TCP               []netip.AddrPort `yaml:"tcp"`
	DoT               []netip.AddrPort `yaml:"dot"`
	DoH               []netip.AddrPort `yaml:"doh"`
	DoQ               []netip.AddrPort `yaml:"doq"`
	HTTP3             bool             `yaml:"http3"`
	ProxyProtocolFrom []netip.Prefix   `yaml:"proxy_protocol_from"`
	Workers           int              `yaml:"workers" min:"0" max:"1024"` // 0: one per CPU
}

// TLS holds the certificates of the encrypted listeners and of admin.
type TLS struct {
	Certificates []Certificate `yaml:"certificates"`
}

// A Certificate is a pair of PEM files.
type Certificate struct {
	Cert string `yaml:"cert" as:"path" need:"yes"`
	Key  string `yaml:"key" as:"path" need:"yes"`
}

// Access says which networks may ask, and which of them without per-source
// limits. The latter are also shown what the caches hold (questions without RD).
type Access struct {
	Allow     []netip.Prefix `yaml:"allow"`
	Unlimited []netip.Prefix `yaml:"unlimited"`
}

// Identify says how the device behind a query is recognised.
type Identify struct {
	ServerNames   []string                  `yaml:"server_names" as:"name"`
	DoHPath       string                    `yaml:"doh_path" as:"urlpath"`
	Relays        []netip.Prefix            `yaml:"relays"`
	Dedicated     []netip.Prefix            `yaml:"dedicated"`
	DefaultDevice map[netip.AddrPort]string `yaml:"default_device" as:"device"`
}

// QNAMEMinimisation is how RFC 9156 is followed.
type QNAMEMinimisation string

const (
	MinimiseOff     QNAMEMinimisation = "off"
	MinimiseRelaxed QNAMEMinimisation = "relaxed" // gives up on servers that break
	MinimiseStrict  QNAMEMinimisation = "strict"
)

// LocalZones says whether the special-use names are answered here.
type LocalZones string

const (
	LocalZonesDefault LocalZones = "default"
	LocalZonesNone    LocalZones = "none"
)

// Recursion steers iterative resolution.
type Recursion struct {
	RootHintsFile     string            `yaml:"root_hints_file" as:"path"` // "": built in
	LocalRoot         string            `yaml:"local_root" as:"path"`      // "": the root servers are asked
	PrimeRoot         bool              `yaml:"prime_root"`
	RefreshRoot       bool              `yaml:"refresh_root"`
	IPv4              bool              `yaml:"ipv4"`
	IPv6              bool              `yaml:"ipv6"`
	QNAMEMinimisation QNAMEMinimisation `yaml:"qname_minimisation"`
	CaseRandomisation bool              `yaml:"case_randomisation"`
	DoNotQuery        DoNotQuery        `yaml:"do_not_query"`
	EDNSBufferSize    uint16            `yaml:"edns_buffer_size" min:"512" max:"4096"`
	HardenGlue        bool              `yaml:"harden_glue"`
	BackgroundLookups bool              `yaml:"background_lookups"`
	QueryTimeout      time.Duration     `yaml:"query_timeout" min:"100ms" max:"2m"`
	ClientWaitUDP     time.Duration     `yaml:"client_wait_udp" min:"100ms" max:"2m"`
	LocalZones        LocalZones        `yaml:"local_zones"`
	Outgoing          []netip.Addr      `yaml:"outgoing"`
	UpstreamPort      uint16            `yaml:"upstream_port" min:"1" max:"65535"`
	ECS               ECS               `yaml:"ecs"`
}

// DoNotQuery holds the networks that are never asked. Default stands for the
// resolver's built-in set.
type DoNotQuery struct {
	Default  bool
	Networks []netip.Prefix
}

// ECS says which zones are sent a client subnet (RFC 7871), and how much of it.
type ECS struct {
	Zones []string `yaml:"zones" as:"name"`
	IPv4  int      `yaml:"ipv4" min:"0" max:"32"`
	IPv6  int      `yaml:"ipv6" min:"0" max:"128"`
}

// LocalData is what is answered for one name without asking anybody. A record is
// "[TTL] TYPE RDATA" in presentation format.
type LocalData struct {
	Name    string   `yaml:"name" as:"name" need:"yes"`
	Records []string `yaml:"records" need:"yes"`
}

// AnyAnswer is what a query of type ANY gets.
type AnyAnswer string

// AnyMinimal is one RRset (RFC 8482).
const AnyMinimal AnyAnswer = "minimal"

// Answers shapes responses.
type Answers struct {
	MaxUDPSize uint16    `yaml:"max_udp_size" min:"512" max:"4096"`
	Minimal    bool      `yaml:"minimal"`
	Rotate     bool      `yaml:"rotate"`
	EDE        bool      `yaml:"ede"`
	Any        AnyAnswer `yaml:"any"`
	// For clients that ask for structured error data: whom to tell of names blocked in error, and who blocks.
	Contact      []string `yaml:"contact"`
	Organization string   `yaml:"organization"`
}

// Cache steers all DNS caches.
type Cache struct {
	Size           int64         `yaml:"size" as:"size" min:"1MiB"` // bytes; 0: by hardware class
	MinTTL         time.Duration `yaml:"min_ttl" min:"0s" max:"168h"`
	MaxTTL         time.Duration `yaml:"max_ttl" min:"0s" max:"168h"`
	MaxNegativeTTL time.Duration `yaml:"max_negative_ttl" min:"0s" max:"168h"`
	AggressiveNSEC bool          `yaml:"aggressive_nsec"`
	Prefetch       bool          `yaml:"prefetch"`
	Persist        bool          `yaml:"persist"`
	ServeStale     ServeStale    `yaml:"serve_stale"`
}

// ServeStale is RFC 8767. ClientTimeout 0 answers stale at once and refreshes
// behind; MaxStale 0 serves nothing stale.
type ServeStale struct {
	Enabled       bool          `yaml:"enabled"`
	MaxStale      time.Duration `yaml:"max_stale" min:"0s" max:"720h"`
	AnswerTTL     time.Duration `yaml:"answer_ttl" min:"0s" max:"1h"`
	ClientTimeout time.Duration `yaml:"client_timeout" min:"0s" max:"1m"`
}

// SHA1 is what signatures made with SHA-1 are worth.
type SHA1 string

const (
	SHA1Insecure SHA1 = "insecure" // RFC 9905
	SHA1Validate SHA1 = "validate"
)

// DNSSEC steers validation.
type DNSSEC struct {
	Validate              bool          `yaml:"validate"`
	TrustAnchorFile       string        `yaml:"trust_anchor_file" as:"path"` // "": built in
	TrustAnchorUpdates    bool          `yaml:"trust_anchor_updates"`
	TrustAnchorSignalling bool          `yaml:"trust_anchor_signalling"`
	SignatureSkew         time.Duration `yaml:"signature_skew" min:"0s" max:"168h"`
	SHA1                  SHA1          `yaml:"sha1"`
	Insecure              []string      `yaml:"insecure" as:"name"`
}

// Rebinding keeps private addresses out of public answers.
type Rebinding struct {
	PrivateAddresses []netip.Prefix `yaml:"private_addresses"`
	PrivateDomains   []string       `yaml:"private_domains" as:"name"`
}

// DNS64 holds the prefix of RFC 6147; the zero prefix is off.
type DNS64 struct {
	Prefix netip.Prefix `yaml:"prefix"`
}

// A StubZone is asked at its own authoritative servers.
type StubZone struct {
	Name      string           `yaml:"name" as:"name" need:"yes"`
	Addresses []netip.AddrPort `yaml:"addresses" as:"upstream" need:"yes"`
	View      string           `yaml:"view" as:"label"`
}

// Strategy is how several upstreams are used.
type Strategy string

const (
	Fastest Strategy = "fastest"
	Hedged  Strategy = "hedged"
	Race    Strategy = "race"
	Quorum  Strategy = "quorum"
)

// A ForwardZone is a zone that other recursive resolvers are asked for.
type ForwardZone struct {
	Name      string     `yaml:"name" as:"name" need:"yes"`
	Upstreams []Upstream `yaml:"upstreams" need:"yes"`
	Strategy  Strategy   `yaml:"strategy" default:"fastest"`
	Quorum    int        `yaml:"quorum" min:"0" max:"64"`
	First     bool       `yaml:"first"` // fall back to iteration when no upstream answers
	View      string     `yaml:"view" as:"label"`
}

// Role is what an upstream is used for. A shadow never answers.
type Role string

const (
	Primary Role = "primary"
	Spare   Role = "spare"
	Shadow  Role = "shadow"
)

// An Upstream is one recursive resolver that is asked.
type Upstream struct {
	URL  UpstreamURL `yaml:"url" need:"yes"`
	Role Role        `yaml:"role" default:"primary"`
}

// UpstreamURL is "SCHEME://ADDRESS[:PORT][/PATH][#NAME]". Scheme is udp, tcp, tls or
// https. A resolver is given by its address, since finding it must not need one; the
// certificate of tls and https must be for NAME, or the address when there is none.
type UpstreamURL struct {
	Text       string // as written
	Scheme     string // "udp", "tcp", "tls", "https"
	Addr       netip.AddrPort
	Path       string // https only, "/dns-query" when left out
	ServerName string // tls and https: the name or address that the certificate must be for
}

// PolicyAction is what is done with a match in a policy zone.
type PolicyAction string

const (
	ActionGiven    PolicyAction = "given" // what the zone says
	ActionDisabled PolicyAction = "disabled"
	ActionPassthru PolicyAction = "passthru"
	ActionDrop     PolicyAction = "drop"
	ActionNXDOMAIN PolicyAction = "nxdomain"
	ActionNODATA   PolicyAction = "nodata"
	ActionTCPOnly  PolicyAction = "tcp-only"
	ActionCNAME    PolicyAction = "cname"
)

// A PolicyZone is a response policy zone that applies to everybody.
type PolicyZone struct {
	Name   string       `yaml:"name" as:"name" need:"yes"`
	File   string       `yaml:"file" as:"path" need:"yes"`
	Action PolicyAction `yaml:"action" default:"given"`
	CNAME  string       `yaml:"cname" as:"name"`
}

// Users says where the users' settings come from.
type Users struct {
	Services      []Endpoint    `yaml:"services" as:"dial"` // empty: standalone
	TLS           ClientTLS     `yaml:"tls"`
	ServiceListen Endpoint      `yaml:"service_listen"`
	PeerListen    Endpoint      `yaml:"peer_listen"`
	WhenCold      string        `yaml:"when_cold" as:"policy"` // Refuse or the name of a policy
	StaleAfter    time.Duration `yaml:"stale_after" min:"1s" max:"24h"`
	ShrinkGuard   ShrinkGuard   `yaml:"shrink_guard"`
}

// ClientTLS is what this node shows to, and expects of, the business-logic
// service and its siblings.
type ClientTLS struct {
	CA         string `yaml:"ca" as:"path"`
	Cert       string `yaml:"cert" as:"path"`
	Key        string `yaml:"key" as:"path"`
	ServerName string `yaml:"server_name"`
}

// ShrinkGuard holds back a loss of more than Share (a fraction of 1) and more
// than Min objects within Window.
type ShrinkGuard struct {
	Share  float64       `yaml:"share" as:"percent"`
	Min    int           `yaml:"min" min:"0" max:"1000000000"`
	Window time.Duration `yaml:"window" min:"1m" max:"720h"`
}

// Limits holds the class and the limits set by name, in the unit of each.
type Limits struct {
	Class string // "auto", or a class such as "8g"
	Set   map[string]int64
}

// Admin is the admin gRPC service.
type Admin struct {
	Listen Endpoint `yaml:"listen"`
}

// HTTP serves /metrics, /livez, /readyz and /debug/pprof.
type HTTP struct {
	Listen Endpoint `yaml:"listen"`
}

// LogLevel is the least severity that is logged.
type LogLevel string

const (
	LevelDebug LogLevel = "debug"
	LevelInfo  LogLevel = "info"
	LevelWarn  LogLevel = "warn"
	LevelError LogLevel = "error"
)

// LogFormat is how log lines look.
type LogFormat string

const (
	FormatText LogFormat = "text"
	FormatJSON LogFormat = "json"
)

// Log steers logging. Queries is where the query log goes: "" (off), "stdout",
// "stderr" or a file.
type Log struct {
	Level   LogLevel  `yaml:"level"`
	Format  LogFormat `yaml:"format"`
	Queries string    `yaml:"queries" as:"logfile"`
}

// Testing names the files that package clock follows.
type Testing struct {
	ClockFile string `yaml:"clock_file" as:"path"`
	WallFile  string `yaml:"wall_file" as:"path"`
}

// Bizd is the configuration of "sluice-bizd run".
type Bizd struct {
	DataDir     string      `yaml:"data_dir" as:"path"`
	Store       string      `yaml:"store"` // "": bbolt in DataDir; else postgres://…
	Listen      Endpoint    `yaml:"listen"`
	TLS         ServerTLS   `yaml:"tls"`
	Transfers   int         `yaml:"transfers" min:"1" max:"10000"`
	ShrinkGuard ShrinkGuard `yaml:"shrink_guard"`
	Fetch       Fetch       `yaml:"fetch"`
	OwnLists    OwnLists    `yaml:"own_lists"`
	HTTP        HTTP        `yaml:"http"`
	Log         Log         `yaml:"log"`
	Testing     Testing     `yaml:"testing"`
}

// ServerTLS is the certificate of the service and the authority of its clients.
type ServerTLS struct {
	Cert     string `yaml:"cert" as:"path"`
	Key      string `yaml:"key" as:"path"`
	ClientCA string `yaml:"client_ca" as:"path"`
}

// Fetch bounds the download of lists.
type Fetch struct {
	MaxSize          int64         `yaml:"max_size" as:"size" min:"1KiB" max:"512MiB"` // resolvers take no more
	Timeout          time.Duration `yaml:"timeout" min:"1s" max:"1h"`
	PrivateAddresses bool          `yaml:"private_addresses"`
	Files            []string      `yaml:"files" as:"path"` // folders whose files file: URLs may name
}

// OwnLists bounds the lists that users have of their own.
type OwnLists struct {
	Number  int   `yaml:"number" min:"1" max:"512"` // of a user
	MaxSize int64 `yaml:"max_size" as:"size" min:"1KiB" max:"512MiB"`
	Rules   int   `yaml:"rules" min:"1" max:"10000000"` // of a user, own rules included
}

var (
	defaultFetch    = Fetch{MaxSize: 300 << 20, Timeout: time.Minute}
	defaultOwnLists = OwnLists{Number: 16, MaxSize: 16 << 20, Rules: 500_000}
)

// Default is the configuration of an empty file, before the host's name is
// filled in.
func Default() *Sluice {
	dns := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:53")}
	loopback := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}
	return &Sluice{
		DataDir:  "/var/lib/sluice",
		Listen:   Listen{UDP: dns, TCP: dns},
		Access:   Access{Allow: loopback, Unlimited: loopback},
		Identify: Identify{DoHPath: "/dns-query"},
		Stranger: Refuse,
		Recursion: Recursion{
			PrimeRoot:         true,
			RefreshRoot:       true,
			IPv4:              true,
			IPv6:              true,
			QNAMEMinimisation: MinimiseRelaxed,
			CaseRandomisation: true,
			DoNotQuery:        DoNotQuery{Default: true},
			EDNSBufferSize:    1232,
			HardenGlue:        true,
			BackgroundLookups: true,
			QueryTimeout:      8 * time.Second,
			ClientWaitUDP:     5 * time.Second,
			LocalZones:        LocalZonesDefault,
			UpstreamPort:      53,
			ECS:               ECS{IPv4: 24, IPv6: 56},
		},
		Answers: Answers{MaxUDPSize: 1232, Minimal: true, EDE: true, Any: AnyMinimal},
		Cache: Cache{
			MaxTTL:         24 * time.Hour,
			MaxNegativeTTL: time.Hour,
			AggressiveNSEC: true,
			Prefetch:       true,
			Persist:        true,
			ServeStale: ServeStale{
				Enabled:       true,
				MaxStale:      24 * time.Hour,
				AnswerTTL:     30 * time.Second,
				ClientTimeout: 1800 * time.Millisecond,
			},
		},
		DNSSEC: DNSSEC{
			Validate:              true,
			TrustAnchorUpdates:    true,
			TrustAnchorSignalling: true,
			SignatureSkew:         time.Hour,
			SHA1:                  SHA1Insecure,
		},
		Users: Users{
			ServiceListen: Endpoint{"tcp", "127.0.0.1:8054"},
			WhenCold:      Refuse,
			StaleAfter:    15 * time.Second,
			ShrinkGuard:   defaultShrinkGuard,
		},
		Fetch:    defaultFetch,
		OwnLists: defaultOwnLists,
		Limits:   Limits{Class: "auto"},
		Admin:    Admin{Listen: Endpoint{"tcp", "127.0.0.1:8053"}},
		HTTP:     HTTP{Listen: Endpoint{"tcp", "127.0.0.1:8080"}},
		Log:      Log{Level: LevelInfo, Format: FormatText},
	}
}

var defaultShrinkGuard = ShrinkGuard{Share: 0.1, Min: 20, Window: 24 * time.Hour}

// DefaultBizd is the configuration of an empty file.
func DefaultBizd() *Bizd {
	return &Bizd{
		DataDir:     "/var/lib/sluice-bizd",
		Listen:      Endpoint{"tcp", "127.0.0.1:8054"},
		Transfers:   4,
		ShrinkGuard: defaultShrinkGuard,
		Fetch:       defaultFetch,
		OwnLists:    defaultOwnLists,
		HTTP:        HTTP{Listen: Endpoint{"tcp", "127.0.0.1:8080"}},
		Log:         Log{Level: LevelInfo, Format: FormatText},
	}
}

// settle fills in what depends on other keys or on the host.
func (c *Sluice) settle() {
	if c.Node.ID == "" {
		// Without a host name the node still needs one of its own in logs.
		if c.Node.ID, _ = os.Hostname(); c.Node.ID == "" {
			c.Node.ID = "localhost"
		}
	}
	if c.Node.Region == "" {
		c.Node.Region = "default"
	}
	for _, z := range c.StubZones {
		for i, a := range z.Addresses {
			if a.Port() == 0 {
				z.Addresses[i] = netip.AddrPortFrom(a.Addr(), c.Recursion.UpstreamPort)
			}
		}
	}
	for _, z := range c.ForwardZones {
		for i := range z.Upstreams {
			z.Upstreams[i].URL.fillPort(c.Recursion.UpstreamPort)
		}
	}
}
