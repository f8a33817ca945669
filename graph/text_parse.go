package graph

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Parse reads the text form of a program. Errors name the line. Parse does not verify the
// program (see Verify). The text has only the kinds of operations made by Define, so own
// must contain these operations.
func Parse(text string, own ...*Operation) (*Program, error) {
	ps := &textParser{own: own, p: &Program{}, bufs: map[string][]int{}, units: map[string][]int{}, params: map[string][]int{}}
	for _, w := range ps.p.wellKnown() {
		*w.id = NoBuf
	}
	header, rest, _ := strings.Cut(text, "\n")
	if header != textHeader {
		return nil, fmt.Errorf("graph: parse: line 1: %q, want %q", clip(header), textHeader)
	}
	// Names first: a line may refer to what comes after it.
	for _, pass := range []func([]string) error{ps.declare, ps.statement} {
		err := unfold(rest, 2, func(number int, line string) error {
			words, err := splitWords(line)
			if err == nil && len(words) > 0 {
				err = pass(words)
			}
			if err != nil {
				return fmt.Errorf("line %d: %w", number, err)
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("graph: parse: %w", err)
		}
	}
	return ps.p, nil
}

type textParser struct {
	p                   *Program
	own                 []*Operation
	bufs, units, params map[string][]int // name → indices
	nBuf, nUnit, nParam int
}

func (ps *textParser) declare(words []string) error {
	var into map[string][]int
	var n *int
	switch words[0] {
	case "buffer":
		into, n = ps.bufs, &ps.nBuf
	case "unit":
		into, n = ps.units, &ps.nUnit
	case "param":
		into, n = ps.params, &ps.nParam
	default:
		return nil
	}
	if len(words) < 2 {
		return fmt.Errorf("%s without a name", words[0])
	}
	name, err := unquoteName(words[1])
	if err != nil {
		return err
	}
	into[name] = append(into[name], *n)
	*n++
	return nil
}

func (ps *textParser) buf(s string) (BufID, error) {
	if s == "_" {
		return NoBuf, nil
	}
	i, err := resolveName("buffer", ps.bufs, s)
	return BufID(i), err
}

func (ps *textParser) statement(words []string) error {
	a := &args{ps: ps, words: words[1:]}
	p := ps.p
	switch words[0] {
	case "mesh":
		for _, w := range a.words {
			i := strings.LastIndexByte(w, '=')
			if i < 0 {
				return fmt.Errorf("%q, want name=size", clip(w))
			}
			name, err := unquoteName(w[:i])
			a.fail(err)
			p.Mesh = append(p.Mesh, Axis{name, int(a.int(w[i+1:], 32))})
		}
		return a.err
	case "events":
		p.Events = int(a.int(a.next("number"), 32))
		if a.err == nil && p.Events < 0 {
			a.fail(fmt.Errorf("%d events, want 0 or more", p.Events))
		}
		return a.keys(func(string, string) bool { return false })
	case "role":
		role := a.next("role")
		id := a.buf(a.next("buffer"))
		if p.Scaler == nil && (role == "loss-scale" || role == "overflow") {
			p.Scaler = &Scaler{State: NoBuf, Overflow: NoBuf}
		}
		for _, w := range p.wellKnown() {
			if w.name == role {
				*w.id = id
				return a.keys(func(string, string) bool { return false })
			}
		}
		a.fail(fmt.Errorf("no role is named %q", clip(role)))
		return a.err
	case "scalars":
		s := Scalars{NoBuf, NoBuf, NoBuf}
		err := a.keys(func(key, value string) bool {
			i := slices.Index(scalarNames[:], key)
			if i >= 0 {
				*s.buffers()[i] = a.buf(value)
			}
			return i >= 0
		})
		p.Scalars = append(p.Scalars, s)
		return err
	case "unit":
		return ps.unit(a)
	case "segment", "value", "compute", "state", "gradient":
		if len(p.Units) == 0 {
			return fmt.Errorf("%s before the first unit", words[0])
		}
		return ps.unitPart(words[0], &p.Units[len(p.Units)-1], a)
	case "param":
		return ps.param(a)
	case "buffer":
		return ps.buffer(a)
	case "section":
		return ps.section(a)
	case "phase":
		return ps.phase(a)
	}
	if words[0] == "throttle" {
		if len(p.Sections) == 0 || len(p.Sections[len(p.Sections)-1].Phases) == 0 {
			return fmt.Errorf("throttle before the first phase")
		}
		s := &p.Sections[len(p.Sections)-1]
		ph := &s.Phases[len(s.Phases)-1]
		ph.Throttles = append(ph.Throttles, Throttle{Before: a.name("first operation"), After: a.name("second operation")})
		return a.keys(func(string, string) bool { return false })
	}
	if strings.HasSuffix(words[0], ":") {
		if len(p.Sections) == 0 || len(p.Sections[len(p.Sections)-1].Phases) == 0 {
			return fmt.Errorf("operation before the first phase")
		}
		s := &p.Sections[len(p.Sections)-1]
		return ps.op(&s.Phases[len(s.Phases)-1], words)
	}
	return fmt.Errorf("%q is not a statement", clip(words[0]))
}

func (ps *textParser) unit(a *args) error {
	p := ps.p
	u := Unit{Name: a.name("name")}
	err := a.keys(func(key, value string) bool {
		switch key {
		case "flat":
			u.FlatLen = a.int(value, 64)
		case "frozen":
			u.Frozen = true
		case "block":
			u.Block = a.block(value)
		case "stage":
			u.Stage = int(a.int(value, 32))
		default:
			return false
		}
		return true
	})
	p.Units = append(p.Units, u)
	return err
}

func (ps *textParser) section(a *args) error {
	p := ps.p
	s := Section{Name: a.name("name")}
	err := a.keys(func(key, value string) bool {
		switch key {
		case "kind":
			s.Kind = SectionKind(a.enum("section", value, sectionKindNames[:]))
		case "form":
			s.Form = Form(a.enum("form", value, formNames[:]))
		case "shares":
			for _, n := range strings.Split(value, ",") {
				s.Shares = append(s.Shares, int(a.int(n, 32)))
			}
		default:
			return false
		}
		return true
	})
	p.Sections = append(p.Sections, s)
	return err
}

func (ps *textParser) phase(a *args) error {
	p := ps.p
	if len(p.Sections) == 0 {
		return fmt.Errorf("phase before the first section")
	}
	ph := Phase{Name: a.name("name")}
	times, ok := strings.CutPrefix(a.next("repetition"), "×")
	if a.err == nil && !ok {
		a.fail(fmt.Errorf("want ×N, how often the phase runs, after its name"))
	}
	ph.Repeat = int(a.int(times, 32))
	err := a.keys(func(key, value string) bool {
		switch key {
		case "kind":
			ph.Kind = PhaseKind(a.enum("phase", value, phaseKindNames[:]))
		case "first":
			ph.First = true
		case "last":
			ph.Last = true
		case "round":
			ph.Round = int(a.int(value, 32))
		default:
			return false
		}
		return true
	})
	s := &p.Sections[len(p.Sections)-1]
	s.Phases = append(s.Phases, ph)
	return err
}

func (ps *textParser) unitPart(what string, u *Unit, a *args) error {
	if what == "segment" {
		s := Segment{Param: a.ref("parameter", ps.params, a.next("parameter"))}
		u.Segments = append(u.Segments, s)
		into := &u.Segments[len(u.Segments)-1]
		return a.keys(func(key, value string) bool {
			switch key {
			case "start":
				into.Start = a.int(value, 64)
			case "len":
				into.Len = a.int(value, 64)
			case "flat":
				into.Flat = a.int(value, 64)
			default:
				return false
			}
			return true
		})
	}
	if what == "gradient" {
		u.Grad = &Gradient{Axis: -1, Replicas: -1}
		return u.Grad.parse(a)
	}
	s := State{Buf: a.buf(a.next("buffer"))}
	err := a.keys(func(key, value string) bool {
		switch key {
		case "name":
			name, err := unquoteName(value)
			a.fail(err)
			s.Name = name
		case "axis":
			s.Axis = int(a.int(value, 32))
		case "len":
			s.Len = a.int(value, 64)
		case "per-param":
			s.PerParam = true
		default:
			return false
		}
		return true
	})
	switch what {
	case "value":
		u.Value = s
	case "compute":
		u.Compute = s
	default:
		u.States = append(u.States, s)
	}
	return err
}

func (g *Gradient) parse(a *args) error {
	g.Leaf = DType(a.enum("dtype", a.next("leaf"), dtypeNames[:]))
	g.Wire = DType(a.enum("dtype", a.next("wire"), dtypeNames[:]))
	for _, id := range g.buffers() {
		*id = NoBuf
	}
	return a.keys(func(key, value string) bool {
		switch key {
		case "order":
			g.Order = SumOrder(a.int(value, 8))
		case "int8":
			g.Int8 = true
		case "each":
			g.Each = true
		case "axis":
			g.Axis = int(a.int(value, 32))
		case "parted":
			g.Parted = true
		case "replicas":
			g.Replicas = int(a.int(value, 32))
		default:
			i := slices.Index(gradientBuffers[:], key)
			if i < 0 {
				return false
			}
			*g.buffers()[i] = a.buf(value)
		}
		return true
	})
}

func (ps *textParser) param(a *args) error {
	q := Param{Name: a.name("name"), Shape: a.ints(a.next("shape")), Unit: -1, Value: NoBuf, Grad: NoBuf}
	q.Init = InitKind(a.enum("init", a.next("init"), initNames[:]))
	err := a.keys(func(key, value string) bool {
		switch key {
		case "std":
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				a.fail(fmt.Errorf("std %q is not a number", clip(value)))
			}
			q.Std = v
		case "unit":
			q.Unit = a.unit(value)
		case "decay":
			q.Decay = true
		case "frozen":
			q.Frozen = true
		case "tied-to":
			q.TiedTo = int(a.int(value, 32))
		case "split":
			q.Split = a.split(value)
		case "value":
			q.Value = a.buf(value)
		case "grad":
			q.Grad = a.buf(value)
		default:
			return false
		}
		return true
	})
	ps.p.Params = append(ps.p.Params, q)
	return err
}

// split reads a Split: dimension and mesh axis, and where slices are more than ranks their number,
// which it is, groups, and the parameter.
func (a *args) split(value string) *Split {
	s := &Split{}
	fields := []*int{&s.Dim, &s.Axis, &s.Slices, &s.Slice, &s.Groups, &s.Of}
	words := strings.Split(value, ":")
	ok := len(words) == 2 || len(words) == len(fields)
	for i, w := range words {
		n, err := strconv.Atoi(w)
		if ok = ok && err == nil; ok {
			*fields[i] = n
		}
	}
	if !ok {
		a.fail(fmt.Errorf("split %q is not a dimension and a mesh axis, as in 0:1, or with slices as in 0:1:4:0:1:0", clip(value)))
	}
	return s
}

func (ps *textParser) buffer(a *args) error {
	b := Buffer{Name: a.name("name"), Unit: -1}
	b.DType = DType(a.enum("dtype", a.next("dtype"), dtypeNames[:]))
	b.Shape = a.ints(a.next("shape"))
	b.Space = Space(a.enum("space", a.next("space"), spaceNames[:]))
	b.Class = Class(a.enum("class", a.next("class"), classNames[:]))
	b.Life = Life(a.enum("life", a.next("life"), lifeNames[:]))
	var v View
	err := a.keys(func(key, value string) bool {
		switch key {
		case "unit":
			b.Unit = a.unit(value)
		case "pad":
			b.Pad = a.int(value, 64)
		case "view":
			v.Base = a.buf(value)
			b.View = &v
		case "offset":
			v.Offset = a.int(value, 64)
		case "stride":
			v.RankStride = a.int(value, 64)
		case "axis":
			v.Axis = int(a.int(value, 32))
		case "port":
			b.Port = Port(a.enum("port", value, portNames[:]))
		case "micro":
			b.Micro = int(a.int(value, 32))
		case "scale-of":
			b.Scale.Of = a.buf(value)
		case "block":
			b.Scale.Block = a.int(value, 64)
		case "global":
			b.Global = a.ints(value)
		case "place":
			for _, s := range a.list(value) {
				b.Place = append(b.Place, Placement(a.enum("placement", s, placementNames[:])))
			}
		default:
			return false
		}
		return true
	})
	if err == nil && b.View == nil && v != (View{}) {
		err = fmt.Errorf("buffer %s: offset, stride or axis without view", b.Name)
	}
	ps.p.Buffers = append(ps.p.Buffers, b)
	return err
}

func (ps *textParser) op(ph *Phase, words []string) error {
	a := &args{ps: ps, words: words}
	op := Op{Work: NoBuf, Skip: NoBuf, Unit: -1}
	a.words[0] = strings.TrimSuffix(a.words[0], ":")
	op.Name = a.name("name")
	op.Kind = Kind(a.name("kind"))
	for _, own := range ps.own {
		if own.Kind() == op.Kind {
			op.Own = own
		}
	}
	for a.err == nil {
		w := a.next("->")
		if w == "->" {
			break
		}
		op.In = append(op.In, a.buf(w))
	}
	for a.err == nil && len(a.words) > 0 && isRef(a.words[0]) {
		w := a.next("output")
		o := Out{}
		switch {
		case strings.HasPrefix(w, "+"):
			o.Mode, w = Accum, w[1:]
		case strings.HasPrefix(w, "~mode("):
			mode, rest, _ := strings.Cut(w[1:], "~")
			o.Mode, w = Mode(a.enum("mode", mode, modeNames[:])), rest
		case strings.HasPrefix(w, "~"):
			o.Mode, w = ReadWrite, w[1:]
		}
		o.Buf = a.buf(w)
		op.Out = append(op.Out, o)
	}
	for a.err == nil && len(a.words) > 0 {
		w := a.next("key")
		if stream, ok := strings.CutPrefix(w, "@"); ok {
			op.Stream = StreamID(a.enum("stream", stream, streamNames[:]))
			continue
		}
		if open := strings.IndexByte(w, '{'); open >= 0 && strings.HasSuffix(w, "}") && !strings.Contains(w[:open], "=") {
			attr, err := parseAttr(&op, w[:open], w[open+1:len(w)-1])
			a.fail(err)
			op.Attr = attr
			continue
		}
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "work":
			op.Work = a.buf(value)
		case "wait":
			for _, e := range strings.Split(value, ",") {
				op.Wait = append(op.Wait, EventID(a.int(e, 32)))
			}
		case "record":
			op.Record = EventID(a.int(value, 32))
		case "pass":
			op.Pass = Pass(a.enum("pass", value, passNames[:]))
		case "unit":
			op.Unit = a.unit(value)
		case "micro":
			op.Micro = int(a.int(value, 32))
		case "from":
			s, err := unquoteName(value)
			a.fail(err)
			op.Source = s
		case "skip":
			op.Skip = a.buf(value)
		default:
			a.fail(fmt.Errorf("%q has no place in an operation", clip(w)))
		}
	}
	ph.Ops = append(ph.Ops, op)
	return a.err
}
