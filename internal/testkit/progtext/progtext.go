// Package progtext reads the text form of programs, which graph.Format writes.
package progtext

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// Header is the first line of every program.
const Header = "spillway program v1"

// reader parses a program's lines. An invalid line causes a panic, which Parse recovers.
type reader struct {
	p     *graph.Program
	own   []*graph.Operation
	names map[string]map[string][]int // "buffer", "unit" or "param" → name → indices
	words []string                    // words of the line that are not read yet
	roles map[string]*graph.BufID
}

// Parse parses the text form of a program. own are the user-defined operations whose kinds it may
// contain. The program is not verified.
func Parse(text string, own ...*graph.Operation) (p *graph.Program, err error) {
	header, rest, _ := strings.Cut(text, "\n")
	if header != Header {
		return nil, fmt.Errorf("progtext: line 1: %.60q, want %q", header, Header)
	}
	at := line{}
	defer func() {
		if r := recover(); r != nil {
			p, err = nil, fmt.Errorf("progtext: line %d: %v in %.80q", at.number, r, at.text)
		}
	}()
	p = &graph.Program{}
	r := &reader{p: p, own: own, names: map[string]map[string][]int{"buffer": {}, "unit": {}, "param": {}}, roles: map[string]*graph.BufID{
		"tokens": &p.Tokens, "targets": &p.Targets, "positions": &p.Positions, "hyper": &p.Hyper, "key": &p.Key,
		"loss": &p.Loss, "grad-norm": &p.GradNorm, "logits": &p.Logits}}
	for _, id := range r.roles {
		*id = graph.NoBuf
	}
	lines := unfold(strings.Split(strings.TrimSuffix(rest, "\n"), "\n"))
	counts := map[string]int{}
	for _, at = range lines { // read all names first: a line may refer to later ones
		words := split(at.text)
		if len(words) < 2 || r.names[words[0]] == nil {
			continue
		}
		of, name := r.names[words[0]], unquote(words[1])
		of[name] = append(of[name], counts[words[0]])
		counts[words[0]]++
	}
	for _, at = range lines {
		if r.words = split(at.text); len(r.words) > 0 {
			r.statement(r.next())
		}
	}
	return p, nil
}

func (r *reader) statement(what string) {
	p := r.p
	switch what {
	case "mesh":
		for len(r.words) > 0 {
			w := r.next()
			i := strings.LastIndexByte(w, '=')
			p.Mesh = append(p.Mesh, graph.Axis{Name: unquote(w[:i]), Size: number[int](w[i+1:])})
		}
	case "events":
		p.Events = number[int](r.next())
	case "role":
		r.role(r.next())
	case "scalars":
		s := graph.Scalars{Hyper: graph.NoBuf, Coef: graph.NoBuf, Skip: graph.NoBuf}
		r.keys(fields{"hyper": r.buf(&s.Hyper), "coef": r.buf(&s.Coef), "skip": r.buf(&s.Skip)})
		p.Scalars = append(p.Scalars, s)
	case "unit":
		u := graph.Unit{Name: unquote(r.next())}
		r.keys(fields{"flat": num(&u.FlatLen), "frozen": flag(&u.Frozen), "stage": num(&u.Stage), "block": func(v string) {
			i := strings.LastIndexByte(v, ':')
			u.Block = graph.Block{Template: unquote(v[:i]), Index: number[int](v[i+1:])}
		}})
		p.Units = append(p.Units, u)
	case "segment":
		s := graph.Segment{Param: r.ref("param", r.next())}
		r.keys(fields{"start": num(&s.Start), "len": num(&s.Len), "flat": num(&s.Flat)})
		u := last(p.Units)
		u.Segments = append(u.Segments, s)
	case "value":
		last(p.Units).Value = r.state()
	case "compute":
		last(p.Units).Compute = r.state()
	case "state":
		u := last(p.Units)
		u.States = append(u.States, r.state())
	case "gradient":
		r.gradient()
	case "param":
		r.param()
	case "buffer":
		r.buffer()
	case "section":
		s := graph.Section{Name: unquote(r.next())}
		r.keys(fields{"kind": oneOf(&s.Kind), "form": oneOf(&s.Form), "shares": func(v string) {
			for _, n := range strings.Split(v, ",") {
				s.Shares = append(s.Shares, number[int](n))
			}
		}})
		p.Sections = append(p.Sections, s)
	case "phase":
		ph := graph.Phase{Name: unquote(r.next())}
		num(&ph.Repeat)(strings.TrimPrefix(r.next(), "×"))
		r.keys(fields{"kind": oneOf(&ph.Kind), "first": flag(&ph.First), "last": flag(&ph.Last), "round": num(&ph.Round)})
		s := last(p.Sections)
		s.Phases = append(s.Phases, ph)
	case "throttle":
		ph := last(last(p.Sections).Phases)
		ph.Throttles = append(ph.Throttles, graph.Throttle{Before: unquote(r.next()), After: unquote(r.next())})
	default:
		ph := last(last(p.Sections).Phases)
		ph.Ops = append(ph.Ops, r.op(unquote(strings.TrimSuffix(what, ":"))))
	}
	if len(r.words) > 0 {
		panic(fmt.Sprintf("%q has no place", r.words[0]))
	}
}

func (r *reader) role(name string) {
	if r.p.Scaler == nil && (name == "loss-scale" || name == "overflow") {
		s := &graph.Scaler{State: graph.NoBuf, Overflow: graph.NoBuf}
		r.p.Scaler, r.roles["loss-scale"], r.roles["overflow"] = s, &s.State, &s.Overflow
	}
	r.buf(r.roles[name])(r.next())
}

func (r *reader) state() (s graph.State) {
	r.buf(&s.Buf)(r.next())
	r.keys(fields{"name": text(&s.Name), "axis": num(&s.Axis), "len": num(&s.Len), "per-param": flag(&s.PerParam)})
	return s
}

func (r *reader) gradient() {
	no := graph.NoBuf
	g := &graph.Gradient{Axis: -1, Replicas: -1, Whole: no, Part: no, Home: no, Sent: no, Update: no, Squares: no}
	oneOf(&g.Leaf)(r.next())
	oneOf(&g.Wire)(r.next())
	r.keys(fields{"order": num(&g.Order), "int8": flag(&g.Int8), "each": flag(&g.Each), "axis": num(&g.Axis), "parted": flag(&g.Parted),
		"replicas": num(&g.Replicas), "whole": r.buf(&g.Whole), "part": r.buf(&g.Part), "home": r.buf(&g.Home), "sent": r.buf(&g.Sent),
		"update": r.buf(&g.Update), "squares": r.buf(&g.Squares)})
	last(r.p.Units).Grad = g
}

// inits are the names of the graph.InitKind values.
var inits = []string{"normal", "ones", "zeros", "uniform"}

func (r *reader) param() {
	q := graph.Param{Name: unquote(r.next()), Shape: numbers(r.next()), Unit: -1, Value: graph.NoBuf, Grad: graph.NoBuf}
	init := r.next()
	for k := range 256 {
		if k < len(inits) && inits[k] == init || fmt.Sprintf("init(%d)", k) == init {
			q.Init = graph.InitKind(k)
		}
	}
	r.keys(fields{"std": func(v string) { q.Std = must(strconv.ParseFloat(v, 64)) }, "unit": r.unit(&q.Unit), "decay": flag(&q.Decay),
		"frozen": flag(&q.Frozen), "tied-to": num(&q.TiedTo), "value": r.buf(&q.Value), "grad": r.buf(&q.Grad), "split": func(v string) {
			q.Split = &graph.Split{}
			s := q.Split
			into := []*int{&s.Dim, &s.Axis, &s.Slices, &s.Slice, &s.Groups, &s.Of}
			for i, w := range strings.Split(v, ":") {
				num(into[i])(w)
			}
		}})
	r.p.Params = append(r.p.Params, q)
}

func (r *reader) buffer() {
	b := graph.Buffer{Name: unquote(r.next()), Unit: -1}
	oneOf(&b.DType)(r.next())
	b.Shape = numbers(r.next())
	oneOf(&b.Space)(r.next())
	oneOf(&b.Class)(r.next())
	oneOf(&b.Life)(r.next())
	v := graph.View{}
	r.keys(fields{"unit": r.unit(&b.Unit), "pad": num(&b.Pad), "offset": num(&v.Offset), "stride": num(&v.RankStride), "axis": num(&v.Axis),
		"view": func(s string) { r.buf(&v.Base)(s); b.View = &v }, "port": oneOf(&b.Port), "micro": num(&b.Micro),
		"scale-of": r.buf(&b.Scale.Of), "block": num(&b.Scale.Block), "global": func(s string) { b.Global = numbers(s) },
		"place": func(s string) {
			for _, w := range list(s) {
				b.Place = append(b.Place, 0)
				oneOf(last(b.Place))(w)
			}
		}})
	r.p.Buffers = append(r.p.Buffers, b)
}

func (r *reader) op(name string) graph.Op {
	op := graph.Op{Name: name, Kind: graph.Kind(unquote(r.next())), Work: graph.NoBuf, Skip: graph.NoBuf, Unit: -1}
	for _, own := range r.own {
		if own.Kind() == op.Kind {
			op.Own = own
		}
	}
	for w := r.next(); w != "->"; w = r.next() {
		op.In = append(op.In, r.id(w))
	}
	for len(r.words) > 0 && isOutput(r.words[0]) {
		w, o := r.next(), graph.Out{}
		switch {
		case strings.HasPrefix(w, "+"):
			o.Mode, w = graph.Accum, w[1:]
		case strings.HasPrefix(w, "~mode("):
			mode, rest, _ := strings.Cut(w[1:], "~")
			oneOf(&o.Mode)(mode)
			w = rest
		case strings.HasPrefix(w, "~"):
			o.Mode, w = graph.ReadWrite, w[1:]
		}
		o.Buf = r.id(w)
		op.Out = append(op.Out, o)
	}
	var rest []string
	for _, w := range r.words {
		open := strings.IndexByte(w, '{')
		switch {
		case w[0] == '@':
			oneOf(&op.Stream)(w[1:])
		case open >= 0 && strings.HasSuffix(w, "}") && !strings.Contains(w[:open], "="):
			op.Attr = attr(&op, w[:open], w[open+1:len(w)-1])
		default:
			rest = append(rest, w)
		}
	}
	r.words = rest
	r.keys(fields{"work": r.buf(&op.Work), "record": num(&op.Record), "pass": oneOf(&op.Pass), "unit": r.unit(&op.Unit), "micro": num(&op.Micro),
		"from": text(&op.Source), "skip": r.buf(&op.Skip), "wait": func(v string) {
			for _, e := range strings.Split(v, ",") {
				op.Wait = append(op.Wait, number[graph.EventID](e))
			}
		}})
	return op
}

// isOutput reports whether a word of an operation is an output, and not a key, attributes or a
// stream.
func isOutput(w string) bool {
	s := strings.TrimLeft(w, "+~")
	if _, after, ok := strings.Cut(s, ")~"); ok && strings.HasPrefix(s, "mode(") {
		s = after
	}
	return strings.HasPrefix(s, `"`) || !strings.ContainsAny(s, "={@")
}
