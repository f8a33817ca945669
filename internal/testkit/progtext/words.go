package progtext

import (
	"fmt"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// line is a line of the text with its line number.
type line struct {
	number int
	text   string
}

// counter matches a number in a folded line: its first value and its step.
var counter = regexp.MustCompile(`<(\d+)([+-]\d+)>`)

// unfold expands folded groups of lines. The header is line 1.
func unfold(lines []string) (out []line) {
	for i := 0; i < len(lines); i++ {
		times, group := 1, lines[i:i+1]
		if head, ok := strings.CutPrefix(lines[i], "×"); ok {
			end := i + 1
			for lines[end] != "}" {
				end++
			}
			times, group = number[int](strings.TrimSuffix(head, " {")), lines[i+1:end]
		}
		for t := range int64(times) {
			for k, l := range group {
				out = append(out, line{i + 2 + k, counter.ReplaceAllStringFunc(l, func(c string) string {
					m := counter.FindStringSubmatch(c)
					return strconv.FormatInt(number[int64](m[1])+t*number[int64](m[2]), 10)
				})})
			}
		}
		if strings.HasPrefix(lines[i], "×") {
			i += len(group) + 1
		}
	}
	return out
}

// word matches a word of a line; spaces inside quotes do not end it.
var word = regexp.MustCompile(`(?:"(?:[^"\\]|\\.)*"|[^" ])+`)

func split(line string) []string { return word.FindAllString(line, -1) }

func (r *reader) next() string {
	w := r.words[0]
	r.words = r.words[1:]
	return w
}

// fields maps the keys of a statement to functions that take their values; "" is the value of a
// flag.
type fields map[string]func(value string)

// keys parses the remaining words as key=value or flags.
func (r *reader) keys(of fields) {
	for len(r.words) > 0 {
		key, value, _ := strings.Cut(r.next(), "=")
		set := of[key]
		if set == nil {
			panic(fmt.Sprintf("%q has no place", key))
		}
		set(value)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// last returns the newest element of the list to which the line belongs.
func last[T any](of []T) *T { return &of[len(of)-1] }

type integer interface {
	~int | ~int32 | ~int64 | ~uint8
}

func number[T integer](s string) T { return T(must(strconv.ParseInt(s, 10, 64))) }

func num[T integer](into *T) func(string) { return func(s string) { *into = number[T](s) } }

func flag(into *bool) func(string) { return func(string) { *into = true } }

func text(into *string) func(string) { return func(s string) { *into = unquote(s) } }

func (r *reader) buf(into *graph.BufID) func(string) { return func(s string) { *into = r.id(s) } }

func (r *reader) unit(into *int) func(string) { return func(s string) { *into = r.ref("unit", s) } }

// oneOf parses the name of an enumeration's value.
func oneOf[T interface {
	~uint8
	fmt.Stringer
}](into *T) func(string) {
	return func(s string) {
		for k := range 256 {
			if T(k).String() == s {
				*into = T(k)
				return
			}
		}
		panic(fmt.Sprintf("%q is no %T", s, *into))
	}
}

func list(s string) []string {
	s = strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

func numbers(s string) (all []int64) {
	for _, n := range list(s) {
		all = append(all, number[int64](n))
	}
	return all
}

func unquote(s string) string {
	if strings.HasPrefix(s, `"`) {
		return must(strconv.Unquote(s))
	}
	return s
}

func (r *reader) id(s string) graph.BufID {
	if s == "_" {
		return graph.NoBuf
	}
	return graph.BufID(r.ref("buffer", s))
}

// ref returns the index to which a word refers. The word is a name, name#1 if several elements have
// the name, or %7 for an index out of range.
func (r *reader) ref(what, s string) int {
	if n, ok := strings.CutPrefix(s, "%"); ok {
		return number[int](n)
	}
	k := 0
	if i := strings.LastIndexByte(s, '#'); i > strings.LastIndexByte(s, '"') {
		k, s = number[int](s[i+1:]), s[:i]
	}
	all := r.names[what][unquote(s)]
	if k >= len(all) {
		panic(fmt.Sprintf("no %s is named %s", what, s))
	}
	return all[k]
}

// value matches a field of an attribute, without a following comma.
var value = regexp.MustCompile(`([\w.]+)=("(?:[^"\\]|\\.)*"|[^,]*)`)

// attr parses the fields of an attribute of the named type, or of the kind's type.
func attr(op *graph.Op, typ, text string) any {
	of := reflect.Type(nil)
	if in, ok := op.Info(); ok && in.Attr != nil {
		of = reflect.TypeOf(in.Attr)
	}
	for _, kind := range graph.Kinds() {
		if in, _ := graph.InfoOf(kind); in.Attr != nil && reflect.TypeOf(in.Attr).Name() == typ {
			of = reflect.TypeOf(in.Attr)
		}
	}
	out := reflect.New(of).Elem()
	for _, m := range value.FindAllStringSubmatch(text, -1) {
		at := out
		for _, part := range strings.Split(m[1], ".") {
			at = at.FieldByName(part)
		}
		switch {
		case at.Kind() == reflect.Bool:
			at.SetBool(must(strconv.ParseBool(m[2])))
		case at.CanInt():
			at.SetInt(number[int64](m[2]))
		case at.CanUint():
			at.SetUint(must(strconv.ParseUint(m[2], 10, 64)))
		case at.CanFloat():
			at.SetFloat(must(strconv.ParseFloat(m[2], 64)))
		default:
			at.SetString(unquote(m[2]))
		}
	}
	return out.Interface()
}
