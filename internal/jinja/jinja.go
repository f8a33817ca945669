// Package jinja renders chat templates as Hugging Face's transformers does, which uses Python's
// Jinja. The engine is minijinja. It lacks some of Python: methods of strings and dicts, dicts
// in key insertion order, and json.dumps. Templates are therefore rewritten before compilation
// so that these become calls of functions in this package.
package jinja

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	minijinja "github.com/mitsuhiko/minijinja/minijinja-go/v2"
	"github.com/mitsuhiko/minijinja/minijinja-go/v2/filters"
	"github.com/mitsuhiko/minijinja/minijinja-go/v2/syntax"
	"github.com/mitsuhiko/minijinja/minijinja-go/v2/value"
)

// Names of the functions in a rewritten template.
const (
	methodFunction   = "__method"
	dictFunction     = "__dict"
	generationFilter = "__generation"
	markVariable     = "__mark"
)

// Template is a compiled template. Its methods may be called concurrently.
type Template struct {
	t         *minijinja.Template
	rewritten string
	// Marks says that the template has {% generation %} blocks.
	Marks bool
}

// Compile compiles a template with the settings of transformers: trim_blocks,
// lstrip_blocks, loop controls, tojson, raise_exception and {% generation %}. The
// function strftime_now is missing on purpose, so that a text does not depend on the day.
func Compile(source string) (*Template, error) {
	rewritten, marks, err := rewrite(source)
	if err != nil {
		return nil, err
	}
	env := minijinja.NewEnvironment()
	env.SetWhitespace(syntax.WhitespaceConfig{TrimBlocks: true, LstripBlocks: true})
	env.SetFormatter(func(_ *minijinja.State, v value.Value, _ func(string) string) string {
		if v.IsUndefined() {
			return ""
		}
		return str(v)
	})
	env.AddFunction("raise_exception", func(_ *minijinja.State, args []value.Value, _ map[string]value.Value) (value.Value, error) {
		var text []string
		for _, a := range args {
			text = append(text, str(a))
		}
		return value.Undefined(), &Raised{strings.Join(text, " ")}
	})
	env.AddFunction(methodFunction, method)
	env.AddFunction(dictFunction, func(_ *minijinja.State, args []value.Value, _ map[string]value.Value) (value.Value, error) {
		d := newDict()
		for i := 0; i+1 < len(args); i += 2 {
			key, ok := args[i].AsString()
			if !ok {
				return value.Undefined(), fmt.Errorf("the keys of a dict must be strings (got %s)", repr(args[i]))
			}
			d.set(key, args[i+1])
		}
		return value.FromObject(d), nil
	})
	env.AddFilter("tojson", toJSON)
	env.AddFilter(generationFilter, func(_ filters.State, v value.Value, args []value.Value, _ map[string]value.Value) (value.Value, error) {
		mark, _ := args[0].AsString()
		return value.FromString(mark + "b" + mark + str(v) + mark + "e" + mark), nil
	})
	for _, name := range []string{"iterable", "sequence"} {
		env.AddTest(name, func(_ filters.State, v value.Value, _ []value.Value) (bool, error) {
			switch v.Kind() {
			case value.KindString, value.KindSeq, value.KindMap, value.KindIterable:
				return true, nil
			}
			return false, nil
		})
	}
	t, err := env.TemplateFromString(rewritten)
	if err != nil {
		return nil, fmt.Errorf("the template: %w", plain(err))
	}
	return &Template{t, rewritten, marks}, nil
}

// Raised is the error of a template that calls raise_exception.
type Raised struct{ Message string }

func (r *Raised) Error() string { return r.Message }

var calledName = regexp.MustCompile(`^[A-Za-z_]\w*`)

// named adds the name of the missing function, which minijinja's error lacks.
func (t *Template) named(err error) error {
	var e *minijinja.Error
	if !errors.As(err, &e) || e.Kind != minijinja.ErrUnknownFunction || e.Span == nil ||
		int(e.Span.StartOffset) > len(t.rewritten) {
		return err
	}
	switch name := calledName.FindString(t.rewritten[e.Span.StartOffset:]); name {
	case "":
		return err
	case "strftime_now":
		return fmt.Errorf("it calls strftime_now (at line %d), which is left out so that a text does not depend on the day; "+
			"give a template with a date in its place", e.Span.StartLine)
	default:
		return fmt.Errorf("it calls %.40s (at line %d), which is no function here; give a template without it", name, e.Span.StartLine)
	}
}

// plain shortens minijinja's errors, whose text may have several lines.
func plain(err error) error {
	var raised *Raised
	if errors.As(err, &raised) {
		return fmt.Errorf("it raises %q", cut(raised.Message))
	}
	text, _, _ := strings.Cut(err.Error(), "\n")
	return errors.New(cut(text))
}

func cut(s string) string {
	if r := []rune(s); len(r) > 200 {
		return string(r[:200]) + "…"
	}
	return s
}

// Span is a range of byte offsets in a text.
type Span struct{ From, To int }

// Render renders the template. vars must be values made by FromJSON, or strings, bools and
// ints. spans are the texts of the {% generation %} blocks.
func (t *Template) Render(vars map[string]any) (text string, spans []Span, err error) {
	all := make(map[string]any, len(vars)+1)
	for k, v := range vars {
		all[k] = v
	}
	for mark := 0xE000; mark < 0xF8FF; mark++ { // private characters
		all[markVariable] = string(rune(mark))
		out, err := t.t.Render(all)
		if err != nil {
			return "", nil, fmt.Errorf("the template: %w", plain(t.named(err)))
		}
		if !t.Marks {
			return out, nil, nil
		}
		// Marker 1 begins a block and 2 ends it. If the text contains the marker, another one
		// is tried.
		text, spans, ok := unmark(out, string(rune(mark)))
		if ok {
			return text, spans, nil
		}
	}
	return "", nil, errors.New("the template: the text contains every private-use character, which leaves no marker for {% generation %}; remove some")
}

func unmark(out, mark string) (string, []Span, bool) {
	begin, end := mark+"b"+mark, mark+"e"+mark
	var text strings.Builder
	var spans []Span
	from := 0
	for {
		i := strings.Index(out[from:], begin)
		if i < 0 {
			break
		}
		text.WriteString(out[from : from+i])
		from += i + len(begin)
		k := strings.Index(out[from:], end)
		if k < 0 {
			return "", nil, false
		}
		spans = append(spans, Span{text.Len(), text.Len() + k})
		text.WriteString(out[from : from+k])
		from += k + len(end)
	}
	text.WriteString(out[from:])
	return text.String(), spans, !strings.Contains(text.String(), mark)
}
