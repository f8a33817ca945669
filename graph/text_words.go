package graph

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
)

func clip(s string) string {
	if len(s) > 60 {
		return s[:60] + "…"
	}
	return s
}

// splitWords splits a line at spaces that are not inside quotes.
func splitWords(line string) ([]string, error) {
	var words []string
	for i := 0; i < len(line); {
		if line[i] == ' ' {
			i++
			continue
		}
		start := i
		for i < len(line) && line[i] != ' ' {
			if line[i] != '"' {
				i++
				continue
			}
			q, err := strconv.QuotedPrefix(line[i:])
			if err != nil {
				return nil, fmt.Errorf("%q: a quote that is not closed", clip(line[i:]))
			}
			i += len(q)
		}
		words = append(words, line[start:i])
	}
	return words, nil
}

// unquoteName undoes quoteName.
func unquoteName(s string) (string, error) {
	if strings.HasPrefix(s, `"`) {
		u, err := strconv.Unquote(s)
		if err != nil {
			return "", fmt.Errorf("%q is not a quoted name", clip(s))
		}
		return u, nil
	}
	if s == "" || strings.IndexFunc(s, func(r rune) bool { return !bareRune(r) }) >= 0 {
		return "", fmt.Errorf("%q is not a name; quote what is not letters, digits and _ . / -", clip(s))
	}
	return s, nil
}

// resolveName resolves a reference in a table of names.
func resolveName(what string, table map[string][]int, s string) (int, error) {
	if num, ok := strings.CutPrefix(s, "%"); ok {
		i, err := strconv.ParseInt(num, 10, 32)
		if err != nil {
			return 0, fmt.Errorf("%q is not an index of a %s", clip(s), what)
		}
		return int(i), nil
	}
	k := 0
	bare := s
	if i := strings.LastIndexByte(s, '#'); i > strings.LastIndexByte(s, '"') {
		n, err := strconv.Atoi(s[i+1:])
		if err != nil || n < 1 {
			return 0, fmt.Errorf("%q: want a number from 1 after #", clip(s))
		}
		k, bare = n, s[:i]
	}
	name, err := unquoteName(bare)
	if err != nil {
		return 0, err
	}
	list := table[name]
	if k >= len(list) {
		return 0, fmt.Errorf("no %s is named %s", what, clip(s))
	}
	return list[k], nil
}

// args are the words of a statement. Only the first error is kept, and methods called after
// it return zero values.
type args struct {
	ps    *textParser
	words []string
	err   error
}

func (a *args) fail(err error) {
	if a.err == nil && err != nil {
		a.err = err
	}
}

func (a *args) next(what string) string {
	if len(a.words) == 0 {
		a.fail(fmt.Errorf("the line ends where a %s should be", what))
		return ""
	}
	w := a.words[0]
	a.words = a.words[1:]
	return w
}

func (a *args) name(what string) string {
	s := a.next(what)
	if a.err != nil {
		return ""
	}
	s, err := unquoteName(s)
	a.fail(err)
	return s
}

func (a *args) enum(what, s string, names []string) int {
	for i, n := range names {
		if n == s {
			return i
		}
	}
	if in, ok := strings.CutPrefix(s, what+"("); ok {
		if i, err := strconv.ParseUint(strings.TrimSuffix(in, ")"), 10, 8); err == nil {
			return int(i)
		}
	}
	a.fail(fmt.Errorf("%q is not a %s, want one of %s", clip(s), what, strings.Join(names, " ")))
	return 0
}

func (a *args) int(s string, bits int) int64 {
	v, err := strconv.ParseInt(s, 10, bits)
	if err != nil {
		a.fail(fmt.Errorf("%q is not a whole number of %d bits", clip(s), bits))
	}
	return v
}

func (a *args) list(s string) []string {
	in, ok1 := strings.CutPrefix(s, "[")
	in, ok2 := strings.CutSuffix(in, "]")
	if !ok1 || !ok2 {
		a.fail(fmt.Errorf("%q is not a list, want [a,b,…]", clip(s)))
		return nil
	}
	if in == "" {
		return nil
	}
	return strings.Split(in, ",")
}

func (a *args) ints(s string) (list []int64) {
	for _, x := range a.list(s) {
		list = append(list, a.int(x, 64))
	}
	return list
}

func (a *args) buf(s string) BufID {
	id, err := a.ps.buf(s)
	a.fail(err)
	return id
}

func (a *args) ref(what string, table map[string][]int, s string) int {
	i, err := resolveName(what, table, s)
	a.fail(err)
	return i
}

func (a *args) block(s string) Block {
	i := strings.LastIndexByte(s, ':')
	if i < 0 {
		a.fail(fmt.Errorf("block %q, want template:index", clip(s)))
		return Block{}
	}
	name, err := unquoteName(s[:i])
	a.fail(err)
	return Block{name, int(a.int(s[i+1:], 32))}
}

func (a *args) unit(s string) int { return a.ref("unit", a.ps.units, s) }

// keys takes the rest of the words as key=value or flags (with empty value).
func (a *args) keys(set func(key, value string) bool) error {
	for a.err == nil && len(a.words) > 0 {
		w := a.next("key")
		key, value, _ := strings.Cut(w, "=")
		if !set(key, value) && a.err == nil {
			a.fail(fmt.Errorf("%q has no place in this statement", clip(w)))
		}
	}
	return a.err
}

// isRef says whether a word of an operation is an operand: not a key, not
// attributes, not a stream.
func isRef(w string) bool {
	s := strings.TrimLeft(w, "+~")
	if _, after, ok := strings.Cut(s, ")~"); ok && strings.HasPrefix(s, "mode(") {
		s = after
	}
	return strings.HasPrefix(s, `"`) || !strings.ContainsAny(s, "={@")
}

// parseAttr reads the fields of an attribute of the type typ, or of the kind's type if typ is
// empty.
func parseAttr(op *Op, typ, fields string) (any, error) {
	t := attrType(op)
	if typ != "" {
		t = attrNamed(typ)
	}
	if t == nil {
		return nil, fmt.Errorf("kind %q has no attributes, or %q is no kind's", clip(string(op.Kind)), clip(typ))
	}
	attr := reflect.New(t).Elem()
	for len(fields) > 0 {
		key, rest, ok := strings.Cut(fields, "=")
		if !ok {
			return nil, fmt.Errorf("%q, want Field=value", clip(fields))
		}
		var value string
		if strings.HasPrefix(rest, `"`) {
			q, err := strconv.QuotedPrefix(rest)
			if err != nil {
				return nil, fmt.Errorf("%q: a quote that is not closed", clip(rest))
			}
			value, rest = q, rest[len(q):]
			if rest != "" {
				if rest[0] != ',' {
					return nil, fmt.Errorf("%q, want a comma after a value", clip(rest))
				}
				rest = rest[1:]
			}
		} else {
			value, rest, _ = strings.Cut(rest, ",")
		}
		fields = rest
		at := attr
		for _, part := range strings.Split(key, ".") {
			if at.Kind() != reflect.Struct {
				return nil, fmt.Errorf("%s has no field %q", t.Name(), clip(key))
			}
			if at = at.FieldByName(part); !at.IsValid() {
				return nil, fmt.Errorf("%s has no field %q", t.Name(), clip(key))
			}
		}
		if err := setField(at, value); err != nil {
			return nil, fmt.Errorf("%s.%s: %w", t.Name(), clip(key), err)
		}
	}
	return attr.Interface(), nil
}

func setField(at reflect.Value, value string) error {
	bad := fmt.Errorf("%q is not a %v", clip(value), at.Type())
	switch at.Kind() {
	case reflect.Bool:
		v, err := strconv.ParseBool(value)
		if err != nil {
			return bad
		}
		at.SetBool(v)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v, err := strconv.ParseInt(value, 10, at.Type().Bits())
		if err != nil {
			return bad
		}
		at.SetInt(v)
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v, err := strconv.ParseUint(value, 10, at.Type().Bits())
		if err != nil {
			return bad
		}
		at.SetUint(v)
	case reflect.Float32, reflect.Float64:
		v, err := strconv.ParseFloat(value, at.Type().Bits())
		if err != nil {
			return bad
		}
		at.SetFloat(v)
	case reflect.String:
		s, err := unquoteName(value)
		if err != nil {
			return err
		}
		at.SetString(s)
	default:
		return bad
	}
	return nil
}
