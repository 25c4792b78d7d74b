package config

import (
	"reflect"
	"slices"
)

// A field is one key of a struct.
type field struct {
	key, def string
	index    int
	typ      reflect.Type
	need     bool
	tags     tags
}

func fieldsOf(t reflect.Type) []field {
	var out []field
	for i := range t.NumField() {
		f := t.Field(i)
		key := f.Tag.Get("yaml")
		if key == "" {
			continue
		}
		out = append(out, field{
			key: key, def: f.Tag.Get("default"), index: i, typ: f.Type, need: f.Tag.Get("need") != "",
			tags: tags{as: f.Tag.Get("as"), min: f.Tag.Get("min"), max: f.Tag.Get("max")},
		})
	}
	return out
}

func keysOf(fields []field) []string {
	var out []string
	for _, f := range fields {
		out = append(out, f.key)
	}
	return out
}

// isLeaf reports whether a struct is written as one value and not as a section.
func isLeaf(t reflect.Type) bool { return len(fieldsOf(t)) == 0 && t != reflect.TypeFor[Limits]() }

// A schema says where each key belongs: "size" -> "cache.size".
type schema map[string][]string

func schemaOf(t reflect.Type) schema {
	s := schema{}
	var walk func(t reflect.Type, path string)
	walk = func(t reflect.Type, path string) {
		if t == reflect.TypeFor[Limits]() {
			s["class"] = append(s["class"], path+".class")
			for _, l := range LimitNames {
				s[l.Name] = append(s[l.Name], path+"."+l.Name)
			}
			return
		}
		for _, f := range fieldsOf(t) {
			here := join(path, f.key)
			s[f.key] = append(s[f.key], here)
			switch {
			case f.typ.Kind() == reflect.Struct:
				walk(f.typ, here)
			case f.typ.Kind() == reflect.Slice && f.typ.Elem().Kind() == reflect.Struct:
				walk(f.typ.Elem(), here+"[]")
			}
		}
	}
	walk(t, "")
	return s
}

func (s schema) keys() []string {
	var out []string
	for k := range s {
		out = append(out, k)
	}
	slices.Sort(out) // for the same suggestion every time
	return out
}
