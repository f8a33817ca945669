package jinja

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"

	"github.com/mitsuhiko/minijinja/minijinja-go/v2/filters"
	"github.com/mitsuhiko/minijinja/minijinja-go/v2/value"
)

// dict is a Python dict: it keeps the order of its keys.
type dict struct {
	keys   []string
	values map[string]value.Value
}

func newDict() *dict { return &dict{values: map[string]value.Value{}} }

func (d *dict) set(key string, v value.Value) {
	if _, ok := d.values[key]; !ok {
		d.keys = append(d.keys, key)
	}
	d.values[key] = v
}

func (d *dict) GetAttr(name string) value.Value {
	if v, ok := d.values[name]; ok {
		return v
	}
	return value.Undefined()
}
func (d *dict) ObjectRepr() value.ObjectRepr { return value.ObjectReprMap }
func (d *dict) Keys() []string               { return d.keys }
func (d *dict) ObjectString() string         { return repr(value.FromObject(d)) }
func (d *dict) String() string               { return d.ObjectString() }

// Map lets filters such as items and dictsort accept a dict.
func (d *dict) Map() map[string]value.Value { return d.values }

// asDict returns v as a dict; nil if it is not one.
func asDict(v value.Value) *dict {
	if o, ok := v.AsObject(); ok {
		d, _ := o.(*dict)
		return d
	}
	if m, ok := v.AsMap(); ok {
		return &dict{slices.Sorted(maps.Keys(m)), m}
	}
	return nil
}

// FromJSON converts JSON to a value whose objects keep their key order.
func FromJSON(text []byte) (any, error) {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	v, err := decode(dec, 0)
	if err == nil {
		if _, more := dec.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("something follows the JSON value")
		}
	}
	return v, err
}

const maxDepth = 200

func decode(dec *json.Decoder, depth int) (value.Value, error) {
	t, err := dec.Token()
	if err != nil {
		return value.Undefined(), err
	}
	if depth > maxDepth {
		return value.Undefined(), fmt.Errorf("it is nested over %d deep", maxDepth)
	}
	switch t := t.(type) {
	case json.Delim:
		d, list := newDict(), []value.Value{}
		for dec.More() {
			var key string
			if t == '{' {
				k, err := dec.Token()
				if err != nil {
					return value.Undefined(), err
				}
				key = k.(string)
			}
			v, err := decode(dec, depth+1)
			if err != nil {
				return value.Undefined(), err
			}
			if t == '{' {
				d.set(key, v)
			} else {
				list = append(list, v)
			}
		}
		if _, err := dec.Token(); err != nil {
			return value.Undefined(), err
		}
		if t == '{' {
			return value.FromObject(d), nil
		}
		return value.FromSlice(list), nil
	case json.Number:
		if n, err := t.Int64(); err == nil {
			return value.FromInt(n), nil
		}
		if n, ok := new(big.Int).SetString(t.String(), 10); ok {
			return value.FromBigInt(n), nil
		}
		f, err := t.Float64()
		return value.FromFloat(f), err
	case string:
		return value.FromString(t), nil
	case bool:
		return value.FromBool(t), nil
	}
	return value.None(), nil
}

// List makes a list of values made by FromJSON.
func List(items []any) any {
	out := make([]value.Value, len(items))
	for i, v := range items {
		out[i] = v.(value.Value)
	}
	return value.FromSlice(out)
}

// float does the same as Python's repr of a float.
func float(f float64) string {
	switch {
	case math.IsInf(f, 1):
		return "inf"
	case math.IsInf(f, -1):
		return "-inf"
	case math.IsNaN(f):
		return "nan"
	}
	format := byte('f')
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		format = 'e'
	}
	s := strconv.FormatFloat(f, format, -1, 64)
	if format == 'f' && !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}

// str does the same as Python's str.
func str(v value.Value) string {
	if s, ok := v.AsString(); ok {
		return s
	}
	return repr(v)
}

// repr does the same as Python's repr.
func repr(v value.Value) string {
	if d := asDict(v); d != nil {
		var parts []string
		for _, k := range d.keys {
			parts = append(parts, quote(k)+": "+repr(d.values[k]))
		}
		return "{" + strings.Join(parts, ", ") + "}"
	}
	if s, ok := v.AsString(); ok {
		return quote(s)
	}
	if list, ok := v.AsSlice(); ok {
		var parts []string
		for _, item := range list {
			parts = append(parts, repr(item))
		}
		return "[" + strings.Join(parts, ", ") + "]"
	}
	if v.IsActualFloat() {
		f, _ := v.AsFloat()
		return float(f)
	}
	return v.String()
}

// quote does the same as Python's repr of a string: it uses single quotes, unless the string
// contains single quotes and no double quotes.
func quote(s string) string {
	q := byte('\'')
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		q = '"'
	}
	var b strings.Builder
	b.WriteByte(q)
	for _, r := range s {
		switch {
		case r == rune(q) || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\r':
			b.WriteString(`\r`)
		case r == '\t':
			b.WriteString(`\t`)
		case r < ' ' || r == 0x7F:
			fmt.Fprintf(&b, `\x%02x`, r)
		case !strconv.IsPrint(r) && r < 0x100:
			fmt.Fprintf(&b, `\x%02x`, r)
		case !strconv.IsPrint(r) && r < 0x10000:
			fmt.Fprintf(&b, `\u%04x`, r)
		case !strconv.IsPrint(r):
			fmt.Fprintf(&b, `\U%08x`, r)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte(q)
	return b.String()
}

// toJSON does the same as transformers' tojson filter: json.dumps with ensure_ascii=False by
// default.
func toJSON(_ filters.State, v value.Value, args []value.Value, kwargs map[string]value.Value) (value.Value, error) {
	j := jsonWriter{item: ", ", key: ": "}
	for i, name := range []string{"ensure_ascii", "indent", "separators", "sort_keys"} {
		if i < len(args) {
			kwargs = maps.Clone(kwargs)
			if kwargs == nil {
				kwargs = map[string]value.Value{}
			}
			kwargs[name] = args[i]
		}
	}
	for name, arg := range kwargs {
		switch name {
		case "ensure_ascii":
			j.ascii = arg.IsTrue()
		case "sort_keys":
			j.sorted = arg.IsTrue()
		case "indent":
			n, ok := arg.AsInt()
			if arg.IsNone() {
				continue
			}
			if !ok || n < 0 || n > 100 {
				return value.Undefined(), fmt.Errorf("tojson: indent must be 0 to 100 (got %s)", repr(arg))
			}
			j.indent, j.indented = strings.Repeat(" ", int(n)), true
			if _, given := kwargs["separators"]; !given {
				j.item = ","
			}
		case "separators":
			pair := arg.Iter()
			list, err := texts(pair, 2, 2)
			if err != nil {
				return value.Undefined(), fmt.Errorf("tojson: separators: %w", err)
			}
			j.item, j.key = list[0], list[1]
		default:
			return value.Undefined(), fmt.Errorf("tojson: unknown argument %.80q", name)
		}
	}
	if err := j.write(v, 0); err != nil {
		return value.Undefined(), fmt.Errorf("tojson: %w", err)
	}
	return value.FromString(j.out.String()), nil
}

type jsonWriter struct {
	out                     strings.Builder
	item, key, indent       string
	ascii, sorted, indented bool
}

func (j *jsonWriter) newline(depth int) {
	if j.indented {
		j.out.WriteString("\n" + strings.Repeat(j.indent, depth))
	}
}

func (j *jsonWriter) write(v value.Value, depth int) error {
	if d := asDict(v); d != nil {
		if len(d.keys) == 0 {
			j.out.WriteString("{}")
			return nil
		}
		keys := d.keys
		if j.sorted {
			keys = slices.Sorted(slices.Values(keys))
		}
		j.out.WriteByte('{')
		for i, k := range keys {
			if i > 0 {
				j.out.WriteString(j.item)
			}
			j.newline(depth + 1)
			j.text(k)
			j.out.WriteString(j.key)
			if err := j.write(d.values[k], depth+1); err != nil {
				return err
			}
		}
		j.newline(depth)
		j.out.WriteByte('}')
		return nil
	}
	if s, ok := v.AsString(); ok {
		j.text(s)
		return nil
	}
	switch v.Kind() {
	case value.KindSeq, value.KindIterable:
		items := v.Iter()
		if len(items) == 0 {
			j.out.WriteString("[]")
			return nil
		}
		j.out.WriteByte('[')
		for i, item := range items {
			if i > 0 {
				j.out.WriteString(j.item)
			}
			j.newline(depth + 1)
			if err := j.write(item, depth+1); err != nil {
				return err
			}
		}
		j.newline(depth)
		j.out.WriteByte(']')
	case value.KindNone:
		j.out.WriteString("null")
	case value.KindBool:
		j.out.WriteString(strings.ToLower(v.String()))
	case value.KindNumber:
		j.out.WriteString(repr(v))
	default:
		return fmt.Errorf("%s is not JSON", v.Kind())
	}
	return nil
}

// text writes a string as json.dumps does.
func (j *jsonWriter) text(s string) {
	j.out.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			j.out.WriteByte('\\')
			j.out.WriteRune(r)
		case r == '\n':
			j.out.WriteString(`\n`)
		case r == '\r':
			j.out.WriteString(`\r`)
		case r == '\t':
			j.out.WriteString(`\t`)
		case r == '\b':
			j.out.WriteString(`\b`)
		case r == '\f':
			j.out.WriteString(`\f`)
		case r < ' ' || j.ascii && r >= 0x7F && r < 0x10000:
			fmt.Fprintf(&j.out, `\u%04x`, r)
		case j.ascii && r >= 0x10000:
			r -= 0x10000
			fmt.Fprintf(&j.out, `\u%04x\u%04x`, 0xD800+r>>10, 0xDC00+r&0x3FF)
		default:
			j.out.WriteRune(r)
		}
	}
	j.out.WriteByte('"')
}
