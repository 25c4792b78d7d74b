package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// A table is rows of cells below a head.
type table struct {
	head []string
	rows [][]string
}

func (t *table) add(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = clean(fmt.Sprint(c))
		if row[i] == "" {
			row[i] = "-"
		}
	}
	t.rows = append(t.rows, row)
}

// show prints messages as objects, or the table.
func show[M proto.Message](a *app, ms []M, t func() *table) error {
	if a.json {
		for _, m := range ms {
			if _, err := fmt.Fprintf(a.stdout, "%s\n", jsonLine(m)); err != nil {
				return failedf("writing: %w", err)
			}
		}
		return nil
	}
	return a.print(t())
}

func (a *app) print(t *table) error {
	w := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
	if len(t.head) > 0 {
		fmt.Fprintln(w, strings.Join(t.head, "\t"))
	}
	for _, row := range t.rows {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	if err := w.Flush(); err != nil {
		return failedf("writing: %w", err)
	}
	return nil
}

// clean makes text safe for a terminal and for one cell: what lists and caches hold is anybody's.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' {
			return ' '
		}
		if unicode.IsControl(r) || r == unicode.ReplacementChar || unicode.Is(unicode.Bidi_Control, r) {
			return '?'
		}
		return r
	}, s)
}

// jsonLine renders a message as one line. It differs from protojson in two ways that scripts like better:
// 64-bit numbers are numbers, and every field of a message of the admin API is there, as 0, "" or [] if need
// be. In messages of user.v1 what is not set is left out, since there it means something.
func jsonLine(m proto.Message) []byte { return appendMessage(nil, m.ProtoReflect()) }

func appendMessage(b []byte, m protoreflect.Message) []byte {
	all := m.Descriptor().ParentFile().Package() == "sluice.admin.v1"
	fields := m.Descriptor().Fields()
	b = append(b, '{')
	first := true
	for i := range fields.Len() {
		f := fields.Get(i)
		if !m.Has(f) && (!all || f.HasPresence()) {
			continue
		}
		if !first {
			b = append(b, ',')
		}
		first = false
		b = strconv.AppendQuote(b, string(f.Name()))
		b = append(b, ':')
		v := m.Get(f)
		switch {
		case f.IsList():
			b = append(b, '[')
			for k := range v.List().Len() {
				if k > 0 {
					b = append(b, ',')
				}
				b = appendValue(b, f, v.List().Get(k))
			}
			b = append(b, ']')
		case f.IsMap():
			b = append(b, '{')
			n := 0
			v.Map().Range(func(key protoreflect.MapKey, v protoreflect.Value) bool {
				if n++; n > 1 {
					b = append(b, ',')
				}
				b = append(appendJSON(b, key.String()), ':')
				b = appendValue(b, f.MapValue(), v)
				return true
			})
			b = append(b, '}')
		default:
			b = appendValue(b, f, v)
		}
	}
	return append(b, '}')
}

func appendValue(b []byte, f protoreflect.FieldDescriptor, v protoreflect.Value) []byte {
	switch f.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return appendMessage(b, v.Message())
	case protoreflect.EnumKind:
		if d := f.Enum().Values().ByNumber(v.Enum()); d != nil {
			return appendJSON(b, string(d.Name()))
		}
		return strconv.AppendInt(b, int64(v.Enum()), 10)
	case protoreflect.BytesKind:
		return appendJSON(b, base64.StdEncoding.EncodeToString(v.Bytes()))
	case protoreflect.DoubleKind, protoreflect.FloatKind:
		if x := v.Float(); math.IsNaN(x) || math.IsInf(x, 0) {
			return append(b, "null"...)
		}
	}
	return appendJSON(b, v.Interface())
}

func appendJSON(b []byte, v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // scalars can always be marshalled
	}
	return append(b, text...)
}

// when writes Unix seconds.
func when(t int64) string {
	if t == 0 {
		return ""
	}
	return time.Unix(t, 0).UTC().Format(time.RFC3339)
}

// age writes milliseconds.
func age(ms uint64) string {
	return (time.Duration(min(ms, math.MaxInt64/1_000_000)) * time.Millisecond).String()
}

// short cuts a digest to what people compare.
func short(hex string) string { return hex[:min(len(hex), 12)] }

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
