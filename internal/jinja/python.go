package jinja

import (
	"errors"
	"fmt"
	"strings"
	"unicode"

	minijinja "github.com/mitsuhiko/minijinja/minijinja-go/v2"
	"github.com/mitsuhiko/minijinja/minijinja-go/v2/value"
)

// methods are the methods of Python's str, dict and list that templates may call.
var methods = map[string]bool{
	"strip": true, "lstrip": true, "rstrip": true, "split": true, "rsplit": true, "splitlines": true, "startswith": true, "endswith": true,
	"upper": true, "lower": true, "title": true, "capitalize": true, "replace": true, "find": true, "rfind": true, "count": true, "join": true,
	"isdigit": true, "isalpha": true, "isspace": true, "removeprefix": true, "removesuffix": true,
	"items": true, "keys": true, "values": true, "get": true,
}

// method calls a method: args are the object, the name and the method's arguments.
func method(_ *minijinja.State, args []value.Value, kwargs map[string]value.Value) (value.Value, error) {
	name, _ := args[1].AsString()
	fail := func(err error) (value.Value, error) {
		return value.Undefined(), fmt.Errorf("method %s of %s: %w", name, kindName(args[0]), err)
	}
	if len(kwargs) > 0 {
		return fail(errors.New("named arguments are not supported"))
	}
	var v value.Value
	var err error
	if s, ok := args[0].AsString(); ok {
		v, err = stringMethod(s, name, args[2:])
	} else if d := asDict(args[0]); d != nil {
		v, err = dictMethod(d, name, args[2:])
	} else {
		err = errNoMethod
	}
	if err != nil {
		return fail(err)
	}
	return v, nil
}

var errNoMethod = errors.New("there is none")

func kindName(v value.Value) string {
	if asDict(v) != nil {
		return "a dict"
	}
	return v.Kind().String()
}

func dictMethod(d *dict, name string, args []value.Value) (value.Value, error) {
	switch name {
	case "items", "keys", "values":
		if len(args) != 0 {
			return value.Undefined(), fmt.Errorf("it takes no argument (got %d)", len(args))
		}
		out := make([]value.Value, len(d.keys))
		for i, k := range d.keys {
			key := value.FromString(k)
			switch name {
			case "items":
				out[i] = value.FromSlice([]value.Value{key, d.values[k]})
			case "keys":
				out[i] = key
			default:
				out[i] = d.values[k]
			}
		}
		return value.FromSlice(out), nil
	case "get":
		if len(args) != 1 && len(args) != 2 {
			return value.Undefined(), fmt.Errorf("it takes 1 or 2 arguments (got %d)", len(args))
		}
		if key, ok := args[0].AsString(); ok {
			if v, ok := d.values[key]; ok {
				return v, nil
			}
		}
		if len(args) == 2 {
			return args[1], nil
		}
		return value.None(), nil
	}
	return value.Undefined(), errNoMethod
}

// texts reads string arguments; there must be between least and most of them.
func texts(args []value.Value, least, most int) ([]string, error) {
	if len(args) < least || len(args) > most {
		return nil, fmt.Errorf("it takes %d to %d arguments (got %d)", least, most, len(args))
	}
	out := make([]string, len(args))
	for i, a := range args {
		s, ok := a.AsString()
		if !ok {
			return nil, fmt.Errorf("argument %d must be a string (got %s)", i+1, repr(a))
		}
		out[i] = s
	}
	return out, nil
}

// limit reads the last of args, the maximum number of splits or replacements; -1 means no
// limit.
func limit(args []value.Value, at int) ([]value.Value, int, error) {
	if len(args) <= at {
		return args, -1, nil
	}
	n, ok := args[at].AsInt()
	if !ok || len(args) > at+1 {
		return nil, 0, fmt.Errorf("argument %d must be the last and a number", at+1)
	}
	return args[:at], int(n), nil
}

// isSpace does the same as Python's str.isspace for one character; unicode.IsSpace lacks four of
// them.
func isSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1C && r <= 0x1F }

// stringMethod calls a method of str. A table: each case is one method.
func stringMethod(s, name string, args []value.Value) (v value.Value, err error) {
	none := func(t func(string) string) (value.Value, error) {
		if _, err := texts(args, 0, 0); err != nil {
			return value.Undefined(), err
		}
		return value.FromString(t(s)), nil
	}
	every := func(is func(rune) bool) (value.Value, error) {
		_, err := texts(args, 0, 0)
		return value.FromBool(s != "" && strings.IndexFunc(s, func(r rune) bool { return !is(r) }) < 0), err
	}
	switch name {
	case "upper":
		return none(strings.ToUpper)
	case "lower":
		return none(strings.ToLower)
	case "capitalize":
		return none(func(s string) string {
			r := []rune(strings.ToLower(s))
			if len(r) > 0 {
				r[0] = unicode.ToTitle(r[0])
			}
			return string(r)
		})
	case "title":
		return none(func(s string) string {
			inside := false
			return strings.Map(func(r rune) rune {
				out := unicode.ToTitle(r)
				if inside {
					out = unicode.ToLower(r)
				}
				inside = unicode.IsLetter(r)
				return out
			}, s)
		})
	case "isdigit":
		return every(unicode.IsDigit)
	case "isalpha":
		return every(unicode.IsLetter)
	case "isspace":
		return every(isSpace)
	case "strip", "lstrip", "rstrip":
		return stripMethod(s, name, args)
	case "split", "rsplit", "splitlines":
		return splitMethod(s, name, args)
	case "startswith", "endswith":
		has := strings.HasPrefix
		if name == "endswith" {
			has = strings.HasSuffix
		}
		if len(args) == 1 && args[0].Kind() == value.KindSeq { // a tuple
			args = args[0].Iter()
		} else if len(args) != 1 {
			return value.Undefined(), fmt.Errorf("it takes 1 argument (got %d)", len(args))
		}
		list, err := texts(args, 0, len(args))
		for _, part := range list {
			if has(s, part) {
				return value.FromBool(true), err
			}
		}
		return value.FromBool(false), err
	case "removeprefix", "removesuffix":
		list, err := texts(args, 1, 1)
		if err != nil {
			return value.Undefined(), err
		}
		if name == "removeprefix" {
			return value.FromString(strings.TrimPrefix(s, list[0])), nil
		}
		return value.FromString(strings.TrimSuffix(s, list[0])), nil
	case "replace":
		rest, n, err := limit(args, 2)
		if err != nil {
			return value.Undefined(), err
		}
		list, err := texts(rest, 2, 2)
		if err != nil {
			return value.Undefined(), err
		}
		return value.FromString(strings.Replace(s, list[0], list[1], n)), nil
	case "find", "rfind", "count":
		list, err := texts(args, 1, 1)
		if err != nil {
			return value.Undefined(), err
		}
		at := strings.Index(s, list[0])
		switch name {
		case "count":
			return value.FromInt(int64(strings.Count(s, list[0]))), nil
		case "rfind":
			at = strings.LastIndex(s, list[0])
		}
		return value.FromInt(int64(len([]rune(s[:max(at, 0)])) + min(at, 0))), nil
	case "join":
		if len(args) != 1 {
			return value.Undefined(), fmt.Errorf("it takes 1 argument (got %d)", len(args))
		}
		items := args[0].Iter()
		list, err := texts(items, 0, len(items))
		return value.FromString(strings.Join(list, s)), err
	}
	return value.Undefined(), errNoMethod
}

func stripMethod(s, name string, args []value.Value) (value.Value, error) {
	list, err := texts(args, 0, 1)
	if err != nil {
		return value.Undefined(), err
	}
	in := isSpace
	if len(list) == 1 {
		in = func(r rune) bool { return strings.ContainsRune(list[0], r) }
	}
	if name != "rstrip" {
		s = strings.TrimLeftFunc(s, in)
	}
	if name != "lstrip" {
		s = strings.TrimRightFunc(s, in)
	}
	return value.FromString(s), nil
}

func splitMethod(s, name string, args []value.Value) (value.Value, error) {
	var parts []string
	switch {
	case name == "splitlines":
		if len(args) != 0 {
			return value.Undefined(), fmt.Errorf("it takes no argument (got %d)", len(args))
		}
		parts = strings.Split(strings.ReplaceAll(strings.ReplaceAll(s, "\r\n", "\n"), "\r", "\n"), "\n")
		if parts[len(parts)-1] == "" {
			parts = parts[:len(parts)-1]
		}
	case len(args) == 0:
		parts = strings.FieldsFunc(s, isSpace)
	default:
		rest, n, err := limit(args, 1)
		if err != nil {
			return value.Undefined(), err
		}
		list, err := texts(rest, 1, 1)
		switch {
		case err != nil:
			return value.Undefined(), err
		case list[0] == "":
			return value.Undefined(), errors.New("the separator is empty")
		}
		parts = strings.Split(s, list[0])
		if n >= 0 && len(parts) > n+1 {
			if name == "split" {
				parts = append(parts[:n:n], strings.Join(parts[n:], list[0]))
			} else {
				k := len(parts) - n
				parts = append([]string{strings.Join(parts[:k], list[0])}, parts[k:]...)
			}
		}
	}
	out := make([]value.Value, len(parts))
	for i, p := range parts {
		out[i] = value.FromString(p)
	}
	return value.FromSlice(out), nil
}
