package config

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"
)

// Bounds on a file, so that none can occupy the daemon for long: aliases can
// make a small file unfold into a huge one, and brackets can nest without end.
const (
	maxFile    = 4 << 20
	maxValues  = 500_000 // values decoded, each alias counted at every use
	maxNesting = 32
	maxKeys    = 4096    // of one mapping: the parser takes quadratic time for them
	maxFlow    = 1 << 15 // values in one pair of brackets: as before
	maxBlank   = 256     // empty lines in a row: as before
)

type position struct{ line, col int }

// A decoder walks the syntax tree of one file along the type of a struct. The
// library's own decoding stops at the first fault and knows nothing of ours.
type decoder struct {
	file    string // as given
	dir     string // folder of the file, absolute
	schema  schema
	anchors map[string]ast.Node
	values  int // decoded so far
	depth   int
	at      map[string]position // where the value of each key stands
	list    []Fault
}

// load decodes the file into c, a pointer to a struct that holds the defaults.
// It returns nil for no path.
func load(path string, c any) *decoder {
	if path == "" {
		return nil
	}
	d := &decoder{file: path}
	abs, err := filepath.Abs(path)
	if err == nil {
		d.dir = filepath.Dir(abs)
		var data []byte
		if data, err = readFile(path, maxFile); err == nil {
			d.decode(data, c)
			return d
		}
	}
	d.fault("file", "cannot be read: "+bare(err), "a readable YAML file of at most 4 MiB; an empty one means the defaults")
	return d
}

func (d *decoder) decode(data []byte, c any) {
	v := reflect.ValueOf(c).Elem()
	d.schema = schemaOf(v.Type())
	d.at = map[string]position{}
	d.anchors = map[string]ast.Node{}
	file, fault := parse(data)
	if fault != nil {
		fault.File = d.file
		d.add(*fault)
		return
	}
	var body ast.Node
	for _, doc := range file.Docs {
		switch {
		case doc == nil || doc.Body == nil || doc.Body.Type() == ast.CommentType:
		case body != nil:
			p := place(doc.Body)
			d.add(Fault{File: d.file, Line: p.line, Col: p.col, Key: "file", What: "a second document starts here", Try: "one document without ---"})
		default:
			body = doc.Body
		}
	}
	if body == nil {
		return
	}
	ast.Walk(anchorCollector{d.anchors}, body)
	d.value(body, v, "", tags{})
}

type anchorCollector struct{ anchors map[string]ast.Node }

func (a anchorCollector) Visit(n ast.Node) ast.Visitor {
	if n, ok := n.(*ast.AnchorNode); ok && n.Name != nil && n.Value != nil {
		a.anchors[n.Name.GetToken().Value] = n.Value
	}
	return a
}

// tags steer the decoding of one field, and of the elements of a list.
type tags struct{ as, min, max string }

// undecoded reports whether the file could not be decoded as a whole, so that
// what keys say together means nothing.
func (d *decoder) undecoded() bool {
	return d.values > maxValues || slices.ContainsFunc(d.list, func(f Fault) bool { return f.Key == "syntax" || f.Key == "file" })
}

// value decodes n into v, reporting what is wrong under path. A value with a
// fault leaves v as it was.
func (d *decoder) value(n ast.Node, v reflect.Value, path string, t tags) {
	n, ok := d.resolve(n, path)
	if !ok {
		return
	}
	if path != "" {
		d.at[path] = place(n)
	}
	d.depth++
	defer func() { d.depth-- }()

	switch p := v.Addr().Interface().(type) {
	case *bool:
		d.boolean(n, p, path)
	case *string:
		d.text(n, p, path, t)
	case *int:
		d.integer(n, path, t, func(i int64) { *p = int(i) })
	case *uint16:
		d.integer(n, path, t, func(i int64) { *p = uint16(i) })
	case *int64:
		d.size(n, p, path, t)
	case *float64:
		d.scalar(n, path, "a share", "10%", func(s string) (err error) { *p, err = parsePercent(s); return })
	case *time.Duration:
		d.duration(n, p, path, t)
	case *netip.AddrPort:
		d.scalar(n, path, "an address and port", "127.0.0.1:53", func(s string) error {
			a, err := parseAddrPort(s, t.as == "upstream")
			*p = a
			return err
		})
	case *netip.Addr:
		d.scalar(n, path, "an address", "192.0.2.1", func(s string) error {
			a, err := netip.ParseAddr(s)
			if err != nil {
				return hint{"is not an address", "192.0.2.1 or 2001:db8::1, without a port"}
			}
			*p = a.Unmap()
			return nil
		})
	case *netip.Prefix:
		d.scalar(n, path, "a network", "192.0.2.0/24", func(s string) error {
			if s == "" && path == "dns64.prefix" {
				*p = netip.Prefix{}
				return nil
			}
			a, err := parsePrefix(s)
			*p = a
			return err
		})
	case *Endpoint:
		if s, ok := n.(*ast.SequenceNode); ok && len(s.Values) == 0 {
			*p = Endpoint{}
			return
		}
		d.scalar(n, path, "an address and port", "127.0.0.1:8053", func(s string) error {
			e, err := d.parseEndpoint(s, t.as == "dial")
			*p = e
			return err
		})
	case *UpstreamURL:
		d.scalar(n, path, "a URL", "udp://192.0.2.1", func(s string) error {
			u, err := parseUpstream(s)
			*p = u
			return err
		})
	case *DoNotQuery:
		d.doNotQuery(n, p, path)
	case *Limits:
		d.limits(n, p, path)
	case *map[netip.AddrPort]string:
		d.devices(n, p, path)
	default:
		switch v.Kind() {
		case reflect.String:
			d.enum(n, v, path)
		case reflect.Slice:
			d.sequence(n, v, path, t)
		case reflect.Struct:
			d.structure(n, v, path)
		default:
			panic("config: no decoding for " + v.Type().String()) // the struct is at fault, not the file
		}
	}
}

// resolve follows anchors and aliases and counts the value against the bounds.
func (d *decoder) resolve(n ast.Node, path string) (ast.Node, bool) {
	for range maxNesting {
		if d.values++; d.values > maxValues || d.depth > maxNesting {
			if d.values == maxValues+1 || d.depth > maxNesting {
				d.faultHere(n, path, "the file unfolds to too many values or too deep a nesting", "fewer aliases (*name)")
			}
			return nil, false
		}
		switch x := n.(type) {
		case *ast.AnchorNode:
			n = x.Value
		case *ast.AliasNode:
			name := ""
			if x.Value != nil && x.Value.GetToken() != nil {
				name = x.Value.GetToken().Value
			}
			target, ok := d.anchors[name]
			if !ok {
				d.faultHere(n, path, fmt.Sprintf("the alias *%s has no anchor &%s", name, name), "the value itself")
				return nil, false
			}
			n = target
		case *ast.TagNode:
			d.faultHere(n, path, "tags such as "+quote(x.Start.Value)+" are not used here", "the value without the tag")
			return nil, false
		case nil:
			return nil, false
		default:
			return n, true
		}
	}
	d.faultHere(n, path, "aliases that lead to each other", "the value itself")
	return nil, false
}

func (d *decoder) faultHere(n ast.Node, path, what, try string) {
	p := place(n)
	d.add(Fault{File: d.file, Line: p.line, Col: p.col, Key: orFile(path), What: what, Try: try})
}

func orFile(path string) string {
	if path == "" {
		return "file"
	}
	return path
}

// A hint is an error that knows what to try. The value is put in front of what.
type hint struct{ what, try string }

func (h hint) Error() string { return h.what + "; try: " + h.try }

// scalar hands the text of n to parse, whatever YAML takes the text for.
func (d *decoder) scalar(n ast.Node, path, want, example string, parse func(string) error) {
	s, ok := scalarText(n)
	if !ok {
		d.fault(path, "must be "+want+", is "+describe(n), example)
		return
	}
	if err := parse(s); err != nil {
		what, try := err.Error(), example
		if h := (hint{}); errors.As(err, &h) {
			what, try = h.what, h.try
		}
		d.fault(path, quote(s)+" "+what, try)
	}
}

func (d *decoder) boolean(n ast.Node, p *bool, path string) {
	if b, ok := n.(*ast.BoolNode); ok {
		*p = b.Value
		return
	}
	try := "true or false"
	if s, ok := scalarText(n); ok {
		switch strings.ToLower(s) {
		case "yes", "y", "on", "1", "true", "enabled":
			try = "true"
		case "no", "n", "off", "0", "false", "disabled":
			try = "false"
		}
	}
	d.fault(path, "must be true or false, is "+describe(n), try)
}

func (d *decoder) text(n ast.Node, p *string, path string, t tags) {
	_, isString := n.(*ast.StringNode)
	_, isLiteral := n.(*ast.LiteralNode)
	if !isString && !isLiteral {
		try := "a text, in quotes if it looks like a number"
		if s, ok := scalarText(n); ok {
			try = strconv.Quote(s)
		}
		d.fault(path, "must be a text, is "+describe(n), try)
		return
	}
	d.scalar(n, path, "a text", `"…"`, func(s string) (err error) {
		s, err = d.parseText(s, t.as, path)
		if err == nil {
			*p = s
		}
		return err
	})
}

func (d *decoder) integer(n ast.Node, path string, t tags, set func(int64)) {
	least, _ := strconv.ParseInt(t.min, 10, 64)
	most, _ := strconv.ParseInt(t.max, 10, 64)
	between := fmt.Sprintf("a whole number from %d to %d", least, most)
	if _, ok := n.(*ast.StringNode); ok {
		d.fault(path, "must be "+between+", is "+describe(n), between+", without quotes")
		return
	}
	d.scalar(n, path, between, between, func(s string) error {
		i, err := strconv.ParseInt(s, 10, 64)
		if err != nil || i < least || i > most {
			return hint{"is not " + between, fmt.Sprint(min(max(i, least), most))}
		}
		set(i)
		return nil
	})
}

func (d *decoder) size(n ast.Node, p *int64, path string, t tags) {
	d.scalar(n, path, "a size", "512MiB", func(s string) error {
		i, err := ParseSize(s)
		if err != nil {
			return err
		}
		if least, err := ParseSize(t.min); err == nil && i != 0 && i < least {
			return hint{"is less than " + t.min, t.min + " or more"}
		}
		if most, err := ParseSize(t.max); err == nil && i > most {
			return hint{"is more than " + t.max, t.max + " or less"}
		}
		*p = i
		return nil
	})
}

func (d *decoder) duration(n ast.Node, p *time.Duration, path string, t tags) {
	d.scalar(n, path, "a duration", "10s", func(s string) error {
		v, err := parseDuration(s)
		if err != nil {
			return err
		}
		if least, err := time.ParseDuration(t.min); err == nil && v < least {
			return hint{"is less than " + t.min, t.min + " or more"}
		}
		if most, err := time.ParseDuration(t.max); err == nil && v > most {
			return hint{"is more than " + t.max, t.max + " or less"}
		}
		*p = v
		return nil
	})
}

func (d *decoder) enum(n ast.Node, v reflect.Value, path string) {
	words := enums[v.Type()]
	all := strings.Join(words, ", ")
	d.scalar(n, path, "one of "+all, all, func(s string) error {
		if slices.Contains(words, s) {
			v.SetString(s)
			return nil
		}
		what := "is none of " + all
		if len(words) == 1 {
			what = "is not known"
		}
		if near := nearest(s, words); near != "" {
			return hint{what, near}
		}
		return hint{what, all}
	})
}

// enums lists the values of each typed string.
var enums = map[reflect.Type][]string{
	reflect.TypeFor[QNAMEMinimisation](): words(MinimiseOff, MinimiseRelaxed, MinimiseStrict),
	reflect.TypeFor[LocalZones]():        words(LocalZonesDefault, LocalZonesNone),
	reflect.TypeFor[AnyAnswer]():         words(AnyMinimal),
	reflect.TypeFor[SHA1]():              words(SHA1Insecure, SHA1Validate),
	reflect.TypeFor[Strategy]():          words(Fastest, Hedged, Race, Quorum),
	reflect.TypeFor[Role]():              words(Primary, Spare, Shadow),
	reflect.TypeFor[PolicyAction](): words(ActionGiven, ActionDisabled, ActionPassthru, ActionDrop,
		ActionNXDOMAIN, ActionNODATA, ActionTCPOnly, ActionCNAME),
	reflect.TypeFor[LogLevel]():  words(LevelDebug, LevelInfo, LevelWarn, LevelError),
	reflect.TypeFor[LogFormat](): words(FormatText, FormatJSON),
}

func words[T ~string](values ...T) []string {
	var out []string
	for _, v := range values {
		out = append(out, string(v))
	}
	return out
}

func (d *decoder) sequence(n ast.Node, v reflect.Value, path string, t tags) {
	seq, ok := n.(*ast.SequenceNode)
	if !ok {
		s, isScalar := scalarText(n)
		if isScalar && s == "" && isListen(v.Type().Elem()) {
			v.SetZero() // "" is off
			return
		}
		try := "a list in [ ]; [] for none"
		if isScalar && s != "" {
			try = "[" + strconv.Quote(s) + "]"
		}
		d.fault(path, "must be a list, is "+describe(n), try)
		return
	}
	if len(seq.Values) == 0 {
		v.SetZero()
		return
	}
	out := reflect.MakeSlice(v.Type(), 0, min(len(seq.Values), 1024))
	for i, e := range seq.Values {
		elem := reflect.New(v.Type().Elem()).Elem()
		elemPath := fmt.Sprintf("%s[%d]", path, i)
		d.value(e, elem, elemPath, t)
		out = reflect.Append(out, elem)
	}
	v.Set(out)
}

func isListen(t reflect.Type) bool {
	return t == reflect.TypeFor[netip.AddrPort]() || t == reflect.TypeFor[Endpoint]()
}

func (d *decoder) structure(n ast.Node, v reflect.Value, path string) {
	fields := fieldsOf(v.Type())
	for _, f := range fields {
		if f.def != "" {
			v.Field(f.index).SetString(f.def)
		}
	}
	found := map[string]bool{}
	text, _ := scalarText(n)
	ok := d.mapping(n, path, form(fields, text), func(key string, keyNode, val ast.Node) {
		i := slices.IndexFunc(fields, func(f field) bool { return f.key == key })
		if i < 0 {
			d.unknown(keyNode, path, key, keysOf(fields))
			return
		}
		found[key] = true
		if _, null := val.(*ast.NullNode); null && v.Field(fields[i].index).Kind() == reflect.Struct && !isLeaf(fields[i].typ) {
			return // a section whose keys are all commented out
		}
		d.value(val, v.Field(fields[i].index), join(path, key), fields[i].tags)
	})
	if !ok {
		return
	}
	for _, f := range fields {
		if f.need && !found[f.key] {
			d.fault(join(path, f.key), "is missing", f.key+": "+f.form())
		} else if fv := v.Field(f.index); f.need && fv.Kind() != reflect.Struct && fv.Len() == 0 && !d.faulty(join(path, f.key)) {
			d.fault(join(path, f.key), "is empty", "at least one value")
		}
	}
}

// form is how to write what has these keys: those that are needed, of which the first has the text that stands in
// their place. "" if none is needed.
func form(fields []field, text string) string {
	var parts []string
	for _, f := range fields {
		switch {
		case !f.need:
		case len(parts) == 0 && text != "" && f.typ.Kind() != reflect.Slice:
			parts = append(parts, f.key+": "+strconv.Quote(text))
		default:
			parts = append(parts, f.key+": "+f.form())
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return "{ " + strings.Join(parts, ", ") + " }"
}

// form is how to write the value of a key, as far as its type tells.
func (f field) form() string {
	if f.typ.Kind() != reflect.Slice {
		return "…"
	}
	if e := f.typ.Elem(); e.Kind() == reflect.Struct && !isLeaf(e) {
		if inner := form(fieldsOf(e), ""); inner != "" {
			return "[" + inner + "]"
		}
	}
	return "[…]"
}

// faulty reports whether key or something in it has a fault already.
func (d *decoder) faulty(key string) bool {
	return slices.ContainsFunc(d.list, func(f Fault) bool { return strings.HasPrefix(f.Key, key) })
}

// mapping calls each for every key of n, and reports keys that stand twice or
// are not words. try is what to write where there is none; "" says nothing of its keys.
func (d *decoder) mapping(n ast.Node, path, try string, each func(key string, keyNode, value ast.Node)) bool {
	m, ok := n.(ast.MapNode)
	if !ok {
		if try == "" {
			try = "keys and values, indented below"
		}
		if path == "" {
			try = "{} or keys such as listen: and cache:"
		}
		d.faultHere(n, path, "must be a mapping of keys to values, is "+describe(n), try)
		return false
	}
	lines := map[string]int{}
	for it := m.MapRange(); it.Next(); {
		keyNode := it.Key()
		key, ok := scalarText(keyNode)
		if !ok {
			d.faultHere(keyNode, path, "a key must be a plain word, is "+describe(keyNode), "key: value")
			continue
		}
		p := place(keyNode)
		if line, twice := lines[key]; twice {
			d.faultHere(keyNode, join(path, clip(key)), fmt.Sprintf("stands twice, first on line %d", line), "one of the two")
			continue
		}
		lines[key] = p.line
		each(key, keyNode, it.Value())
	}
	return true
}

// unknown reports a key that does not exist at path: it may belong elsewhere, or
// be misspelt.
func (d *decoder) unknown(n ast.Node, path, key string, here []string) {
	short := key
	homes := d.schema[short]
	if i := strings.LastIndexByte(key, '.'); i >= 0 { // "cache.size: 1GiB"
		short = key[i+1:]
		if homes = d.schema[short]; slices.Contains(homes, key) {
			homes = []string{key}
		}
	}
	try := "one of " + strings.Join(here, ", ")
	if slices.Contains(here, short+"s") {
		try = short + "s" // a singular here is likelier meant than the same word elsewhere
	} else if len(homes) > 0 {
		try = "it belongs to " + strings.Join(homes, " or ") + ", as " + nested(homes[0])
	} else if near := nearest(key, here); near != "" {
		try = near
	} else if near := nearest(short, d.schema.keys()); near != "" {
		try = near + ", which belongs to " + strings.Join(d.schema[near], " or ")
	}
	d.faultHere(n, join(path, clip(key)), "unknown key", try)
}

// nested writes the path a.b.c the way YAML does.
func nested(path string) string {
	parts := strings.Split(strings.ReplaceAll(path, "[]", ""), ".")
	last := len(parts) - 1
	out := parts[last] + ": …"
	for i := last - 1; i >= 0; i-- {
		out = parts[i] + ": { " + out + " }"
	}
	return out
}

func (d *decoder) doNotQuery(n ast.Node, p *DoNotQuery, path string) {
	var list []string
	before := len(d.list)
	d.sequence(n, reflect.ValueOf(&list).Elem(), path, tags{})
	if len(d.list) > before {
		return
	}
	out := DoNotQuery{}
	for i, s := range list {
		if s == "default" {
			out.Default = true
			continue
		}
		net, err := parsePrefix(s)
		if err != nil {
			h := err.(hint)
			d.fault(fmt.Sprintf("%s[%d]", path, i), quote(s)+" "+h.what, h.try+", or the word default")
			continue
		}
		out.Networks = append(out.Networks, net)
	}
	*p = out
}

func (d *decoder) devices(n ast.Node, p *map[netip.AddrPort]string, path string) {
	out := map[netip.AddrPort]string{}
	d.mapping(n, path, "", func(key string, keyNode, val ast.Node) {
		here := path + "[" + clip(key) + "]"
		var device string
		d.value(val, reflect.ValueOf(&device).Elem(), here, tags{as: "device"})
		d.at[here] = place(keyNode) // from here on the address is at fault
		addr, err := parseAddrPort(key, false)
		if err != nil {
			h := err.(hint)
			d.fault(here, quote(key)+" "+h.what, strconv.Quote(h.try)+": DEVICE")
		}
		if _, twice := out[addr]; twice && err == nil {
			d.fault(here, "stands twice", "one of the two")
		}
		out[addr] = device
	})
	*p = out
}

// LimitNames are the limits that can be set by name, with the unit of each:
// "bytes" is written as a size, any other as a whole number.
var LimitNames = []struct{ Name, Unit string }{
	{"memory", "bytes"},
	{"cache", "bytes"},
	{"tcp_connections", "connections"},
	{"dot_connections", "connections"},
	{"doh_connections", "connections"},
	{"doq_connections", "connections"},
	{"connections_per_source", "connections"},
	{"pipelining", "queries"},
	{"in_flight", "queries"},
	{"handshakes", "handshakes"},
	{"client_rate", "answers/s"},
	{"client_outstanding", "queries"},
	{"tree_queries", "queries"},
	{"tree_failed_validations", "validations"},
}

func (d *decoder) limits(n ast.Node, p *Limits, path string) {
	if _, null := n.(*ast.NullNode); null {
		return
	}
	names := []string{"class"}
	for _, l := range LimitNames {
		names = append(names, l.Name)
	}
	out := Limits{Class: p.Class, Set: map[string]int64{}}
	d.mapping(n, path, "", func(key string, keyNode, val ast.Node) {
		here := join(path, key)
		i := slices.Index(names, key)
		switch {
		case i < 0:
			d.unknown(keyNode, path, key, names)
		case key == "class":
			if val, ok := d.resolve(val, here); ok {
				d.at[here] = place(val)
				d.scalar(val, here, "a class", "auto, 2g, 8g, 32g, 64g", func(s string) error {
					if !isClass(s) {
						return hint{"is not a class", "auto, or the memory of the class such as 2g, 8g, 32g, 64g"}
					}
					out.Class = s
					return nil
				})
			}
		case LimitNames[i-1].Unit == "bytes":
			var size int64
			d.value(val, reflect.ValueOf(&size).Elem(), here, tags{min: "1MiB"})
			out.Set[key] = size
			if size == 0 && !d.faulty(here) {
				d.fault(here, "0 is no limit that can be kept", "leave the key out, then the class decides")
			}
		default:
			var count int
			d.value(val, reflect.ValueOf(&count).Elem(), here, tags{min: "1", max: "1000000000"})
			out.Set[key] = int64(count)
		}
	})
	if len(out.Set) == 0 {
		out.Set = nil
	}
	*p = out
}

// isClass accepts "auto", "Ng" and "Nm". Which classes exist is the business of
// the limits package.
func isClass(s string) bool {
	if s == "auto" {
		return true
	}
	digits := strings.TrimRight(s, "gm")
	n, err := strconv.Atoi(digits)
	return err == nil && n > 0 && len(s) == len(digits)+1 && digits[0] != '+' && digits[0] != '0'
}

// readFile reads at most limit bytes and refuses a longer file.
func readFile(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.IsDir() {
		return nil, errors.New("it is a directory")
	}
	return readAtMost(f, limit)
}
