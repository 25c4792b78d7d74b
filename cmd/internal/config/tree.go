package config

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// parse turns bytes into a tree. The parser recurses, so nesting is bounded
// before it runs; and as it is not ours and has panicked on odd input before, a
// panic in it is a syntax error of the file.
func parse(data []byte) (file *ast.File, fault *Fault) {
	var last *token.Token
	defer func() {
		if r := recover(); r != nil {
			file, fault = nil, syntaxFault(last, "this is not YAML that can be understood")
		}
	}()
	if line := longBlank(data); line > 0 {
		return nil, &Fault{Line: line, Col: 1, Key: "syntax", What: fmt.Sprintf("more than %d empty lines", maxBlank), Try: "fewer"}
	}
	tokens := lexer.Tokenize(string(data))
	if fault := bounds(tokens, &last); fault != nil {
		return nil, fault
	}
	file, err := parser.Parse(tokens, 0, parser.AllowDuplicateMapKey())
	if err == nil {
		return file, nil
	}
	if e := yaml.Error(nil); errors.As(err, &e) {
		return nil, syntaxFault(e.GetToken(), e.GetMessage())
	}
	return nil, syntaxFault(nil, err.Error())
}

// bounds refuses what would make the parser recurse too deep or run too long.
func bounds(tokens token.Tokens, last **token.Token) *Fault {
	var (
		open   []int           // commas in each bracket that is open
		keys   = map[int]int{} // keys of the mapping that is open in block style, by column
		inline = 0             // "- - - x" and [a:b:c:d] nest on one line
		line   = 0
	)
	for _, t := range tokens {
		*last = t
		if t.Position == nil {
			continue
		}
		if t.Position.Line != line {
			line, inline = t.Position.Line, 0
		}
		switch t.Type {
		case token.SequenceStartType, token.MappingStartType:
			open = append(open, 0)
		case token.SequenceEndType, token.MappingEndType:
			open = open[:max(len(open)-1, 0)]
		case token.CollectEntryType:
			inline = 0
			if len(open) > 0 {
				open[len(open)-1]++
			}
		case token.MappingKeyType:
			return syntaxFault(t, "a key that begins with a question mark")
		case token.TagType, token.AnchorType:
			inline++
		case token.SequenceEntryType:
			inline++
			maps.DeleteFunc(keys, func(col, _ int) bool { return col > t.Position.Column })
		case token.MappingValueType:
			inline++
			if len(open) == 0 && t.Prev != nil && t.Prev.Position != nil {
				keys[t.Prev.Position.Column]++
				if keys[t.Prev.Position.Column] > maxKeys {
					return syntaxFault(t, fmt.Sprintf("more than %d keys in one mapping", maxKeys))
				}
			}
		}
		if len(open) > maxNesting || inline > maxNesting {
			return syntaxFault(t, fmt.Sprintf("nested more than %d deep", maxNesting))
		}
		if len(open) > 0 && open[len(open)-1] > maxFlow {
			return syntaxFault(t, fmt.Sprintf("more than %d values in one pair of brackets", maxFlow))
		}
	}
	return nil
}

// longBlank returns the line that ends a run of too many empty lines, or 0.
func longBlank(data []byte) int {
	line, run := 1, 0
	for _, c := range data {
		switch c {
		case '\n', '\r':
			line++
			if run++; run > maxBlank {
				return line
			}
		case ' ', '\t':
		default:
			run = 0
		}
	}
	return 0
}

func syntaxFault(t *token.Token, what string) *Fault {
	f := &Fault{Line: 1, Col: 1, Key: "syntax", What: what, Try: "check indentation, colons, quotes and brackets here and on the line before"}
	if t != nil && t.Position != nil {
		f.Line, f.Col = max(t.Position.Line, 1), max(t.Position.Column, 1)
	}
	if strings.Contains(what, "\t") {
		f.Try = "spaces instead of tabs"
	}
	return f
}

func scalarText(n ast.Node) (string, bool) {
	switch n := n.(type) {
	case *ast.StringNode:
		return n.Value, true
	case *ast.LiteralNode:
		if n.Value == nil {
			return "", false
		}
		return n.Value.Value, true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		return n.GetToken().Value, true
	case *ast.MappingNode:
		if len(n.Values) == 1 && !n.IsFlowStyle {
			return gluedText(n.Values[0])
		}
	case *ast.MappingValueNode:
		return gluedText(n)
	}
	return "", false
}

// gluedText undoes a misreading of the parser: in [127.0.0.1:53] YAML sees one
// text, since no space follows the colon, and the parser sees a mapping.
func gluedText(n *ast.MappingValueNode) (string, bool) {
	switch n.Key.(type) {
	case *ast.StringNode, *ast.IntegerNode, *ast.FloatNode:
	default:
		return "", false
	}
	key := n.Key.GetToken()
	value, ok := scalarText(n.Value)
	if !ok || n.Start == nil || n.Start.Position == nil || key.Position == nil ||
		key.Type == token.SingleQuoteType || key.Type == token.DoubleQuoteType {
		return "", false
	}
	colon, next := n.Start.Position, place(n.Value)
	if next != (position{colon.Line, colon.Column + 1}) || key.Position.Column+len(key.Value) != colon.Column {
		return "", false
	}
	return key.Value + ":" + value, true
}

// describe says what a value is, for "must be …, is …".
func describe(n ast.Node) string {
	if s, ok := scalarText(n); ok {
		switch n.(type) {
		case *ast.BoolNode:
			return s
		case *ast.StringNode, *ast.LiteralNode:
			return "the text " + quote(s)
		}
		return "the number " + clip(s)
	}
	switch n.(type) {
	case ast.MapNode:
		return "a mapping"
	case *ast.SequenceNode:
		return "a list"
	case *ast.NullNode:
		return "nothing"
	case *ast.MergeKeyNode:
		return "a merge key (<<)"
	}
	return "something else"
}

func place(n ast.Node) position {
	if n == nil || reflect.ValueOf(n).IsNil() {
		return position{1, 1}
	}
	t := n.GetToken()
	switch n := n.(type) {
	case *ast.MappingNode:
		// In block style the node's own token is the colon of its first key.
		if !n.IsFlowStyle && len(n.Values) > 0 {
			return place(n.Values[0])
		}
	case *ast.MappingValueNode:
		if n.Key != nil {
			t = n.Key.GetToken()
		}
	}
	if t == nil || t.Position == nil {
		return position{1, 1}
	}
	return position{max(t.Position.Line, 1), max(t.Position.Column, 1)}
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// quote and clip keep what the file says readable in a message.
func quote(s string) string { return strconv.Quote(clip(s)) }

func clip(s string) string {
	if r := []rune(s); len(r) > 80 {
		return string(r[:80]) + "…"
	}
	return s
}
