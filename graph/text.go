package graph

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"reflect"
	"strconv"
	"strings"
)

// The text form of a program, version 1. Each line is a statement. Names with other characters than
// letters, digits and _ . / - are quoted as in Go. Statements refer to buffers, units and
// parameters by name. If several have the same name, the second is name#1, the third name#2. An
// absent buffer is _, and %7 is an index 7 out of range. Omitted keys have their zero value; for
// unit that is -1.
//
//	spillway program v1
//	mesh data=4
//	shares 2 2 1 1
//	events 12
//	role tokens tokens
//	unit h.0 flat=1024 frozen block=h:0
//	  segment h.0.w start=0 len=640 flat=0
//	  value value/h.0 name=value axis=0 len=256 per-param
//	  state exp_avg/h.0 name=exp_avg axis=0 len=256
//	param h.0.w [64,10] normal std=0.02 unit=h.0 decay frozen split=0:1 value=h.0.w grad=h.0.w.grad
//	buffer host/tokens i32 [4,64] host inputs run port=tokens
//	buffer h.0.w f32 [64,10] device parameters run unit=h.0 pad=8 view=flat/h.0 offset=0 stride=256 axis=0 global=[256] place=[shard]
//	section step kind=step
//	phase middle ×3 kind=micro
//	  h.0.fc: linear x h.0.w _ -> h.0.fc {TransW=true} @comm work=ws wait=1,2 record=3 pass=backward unit=h.0 from=h.0.fc skip=flag
//
// Outputs are written; +y is accumulated into, ~y changed in place. Attributes print the fields
// that are not zero. Streams other than compute follow an @. An unscheduled phase's throttles
// (before, after) follow its operations.
//
// Three or more groups of lines in a row fold into one if they differ only in numbers, each by a
// constant step: <3+2> counts 3, 5, 7 …
//
//	×126 {
//	    h.<0+1>.fc: linear x<0+2> …
//	}
//
// Folding is the last step of formatting and loses no information.

const textHeader = "spillway program v1"

// Format returns the program's text form. Programs have different texts unless they differ only in
// nil and empty lists.
func Format(p *Program) string {
	var b strings.Builder
	b.WriteString(textHeader + "\n")
	foldLines(&b, formatLines(p))
	return b.String()
}

// Hash returns the SHA-256 of the program's text form, in hexadecimal.
func Hash(p *Program) string {
	sum := sha256.Sum256([]byte(Format(p)))
	return hex.EncodeToString(sum[:])
}

var initNames = [...]string{"normal", "ones", "zeros", "uniform"}

type formatter struct {
	p                   *Program
	bufs, units, params []string // by index: the reference to it in the text
	line                []byte
	lines               []string
}

func formatLines(p *Program) []string {
	f := &formatter{p: p}
	names := func(n int, at func(int) string) []string {
		seen := map[string]int{}
		out := make([]string, n)
		for i := range out {
			s := at(i)
			out[i] = quoteName(s)
			if k := seen[s]; k > 0 {
				out[i] += "#" + strconv.Itoa(k)
			}
			seen[s]++
		}
		return out
	}
	f.bufs = names(len(p.Buffers), func(i int) string { return p.Buffers[i].Name })
	f.units = names(len(p.Units), func(i int) string { return p.Units[i].Name })
	f.params = names(len(p.Params), func(i int) string { return p.Params[i].Name })

	if len(p.Mesh) > 0 {
		f.word("mesh")
		for _, a := range p.Mesh {
			f.word(quoteName(a.Name) + "=" + strconv.Itoa(a.Size))
		}
		f.end()
	}
	if p.Events != 0 {
		f.word("events")
		f.word(strconv.Itoa(p.Events))
		f.end()
	}
	for _, w := range p.wellKnown() {
		if *w.id != NoBuf {
			f.word("role")
			f.word(w.name)
			f.word(f.buf(*w.id))
			f.end()
		}
	}
	for i := range p.Scalars {
		f.word("scalars")
		for k, id := range p.Scalars[i].buffers() {
			if *id != NoBuf {
				f.key(scalarNames[k], f.buf(*id))
			}
		}
		f.end()
	}
	for i := range p.Units {
		f.unit(i)
	}
	for i := range p.Params {
		f.param(i)
	}
	for i := range p.Buffers {
		f.buffer(i)
	}
	for i := range p.Sections {
		f.section(&p.Sections[i])
	}
	return f.lines
}

func (f *formatter) section(s *Section) {
	f.word("section")
	f.word(quoteName(s.Name))
	if s.Kind != SectionOther {
		f.key("kind", s.Kind.String())
	}
	if s.Form != FormWhole {
		f.key("form", s.Form.String())
	}
	if len(s.Shares) > 0 {
		f.key("shares", strings.ReplaceAll(strings.Trim(fmt.Sprint(s.Shares), "[]"), " ", ","))
	}
	f.end()
	for j := range s.Phases {
		ph := &s.Phases[j]
		f.word("phase")
		f.word(quoteName(ph.Name))
		f.word("×" + strconv.Itoa(ph.Repeat))
		if ph.Kind != OtherPhase {
			f.key("kind", ph.Kind.String())
		}
		f.flag("first", ph.First)
		f.flag("last", ph.Last)
		f.num("round", int64(ph.Round), 0)
		f.end()
		for k := range ph.Ops {
			f.op(&ph.Ops[k])
		}
		for _, t := range ph.Throttles {
			f.word("throttle")
			f.word(quoteName(t.Before))
			f.word(quoteName(t.After))
			f.end()
		}
	}
}

func (f *formatter) word(s string) {
	if n := len(f.line); n > 0 && f.line[n-1] != ' ' {
		f.line = append(f.line, ' ')
	}
	f.line = append(f.line, s...)
}

func (f *formatter) indent() { f.line = append(f.line, "  "...) }

func (f *formatter) key(key, value string) { f.word(key + "=" + value) }

func (f *formatter) num(key string, v, zero int64) {
	if v != zero {
		f.key(key, strconv.FormatInt(v, 10))
	}
}

func (f *formatter) flag(key string, on bool) {
	if on {
		f.word(key)
	}
}

func (f *formatter) end() {
	f.lines = append(f.lines, string(f.line))
	f.line = f.line[:0]
}

func refName(names []string, i int) string {
	if i >= 0 && i < len(names) {
		return names[i]
	}
	return "%" + strconv.Itoa(i)
}

func (f *formatter) buf(id BufID) string {
	if id == NoBuf {
		return "_"
	}
	return refName(f.bufs, int(id))
}

func (f *formatter) unitOf(i int) {
	if i != -1 {
		f.key("unit", refName(f.units, i))
	}
}

func (f *formatter) unit(i int) {
	u := &f.p.Units[i]
	f.word("unit")
	f.word(quoteName(u.Name))
	f.num("flat", u.FlatLen, 0)
	f.flag("frozen", u.Frozen)
	if u.Block != (Block{}) {
		f.key("block", quoteName(u.Block.Template)+":"+strconv.Itoa(u.Block.Index))
	}
	f.num("stage", int64(u.Stage), 0)
	f.end()
	for _, s := range u.Segments {
		f.indent()
		f.word("segment")
		f.word(refName(f.params, s.Param))
		f.num("start", s.Start, 0)
		f.num("len", s.Len, 0)
		f.num("flat", s.Flat, 0)
		f.end()
	}
	state := func(what string, s State) {
		f.indent()
		f.word(what)
		f.word(f.buf(s.Buf))
		if s.Name != "" {
			f.key("name", quoteName(s.Name))
		}
		f.num("axis", int64(s.Axis), 0)
		f.num("len", s.Len, 0)
		f.flag("per-param", s.PerParam)
		f.end()
	}
	if u.Value != (State{}) {
		state("value", u.Value)
	}
	if u.Compute != (State{}) {
		state("compute", u.Compute)
	}
	for _, s := range u.States {
		state("state", s)
	}
	if g := u.Grad; g != nil {
		f.gradient(g)
	}
}

func (f *formatter) gradient(g *Gradient) {
	f.indent()
	f.word("gradient")
	f.word(g.Leaf.String())
	f.word(g.Wire.String())
	f.num("order", int64(g.Order), 0)
	f.flag("int8", g.Int8)
	f.flag("each", g.Each)
	f.num("axis", int64(g.Axis), -1)
	f.flag("parted", g.Parted)
	f.num("replicas", int64(g.Replicas), -1)
	for i, id := range g.buffers() {
		if *id != NoBuf {
			f.key(gradientBuffers[i], f.buf(*id))
		}
	}
	f.end()
}

func (f *formatter) param(i int) {
	q := &f.p.Params[i]
	f.word("param")
	f.word(quoteName(q.Name))
	f.word(formatInts(q.Shape))
	f.word(name(initNames[:], int(q.Init), "init"))
	if q.Std != 0 {
		f.key("std", formatFloat(q.Std))
	}
	f.unitOf(q.Unit)
	f.flag("decay", q.Decay)
	f.flag("frozen", q.Frozen)
	f.num("tied-to", int64(q.TiedTo), 0)
	if s := q.Split; s != nil {
		v := strconv.Itoa(s.Dim) + ":" + strconv.Itoa(s.Axis)
		if s.Slices > 0 {
			v += fmt.Sprintf(":%d:%d:%d:%d", s.Slices, s.Slice, s.Groups, s.Of)
		}
		f.key("split", v)
	}
	if q.Value != NoBuf {
		f.key("value", f.buf(q.Value))
	}
	if q.Grad != NoBuf {
		f.key("grad", f.buf(q.Grad))
	}
	f.end()
}

func (f *formatter) buffer(i int) {
	b := &f.p.Buffers[i]
	f.word("buffer")
	f.word(quoteName(b.Name))
	f.word(b.DType.String())
	f.word(formatInts(b.Shape))
	f.word(b.Space.String())
	f.word(b.Class.String())
	f.word(b.Life.String())
	f.unitOf(b.Unit)
	f.num("pad", b.Pad, 0)
	if v := b.View; v != nil {
		f.key("view", f.buf(v.Base))
		f.num("offset", v.Offset, 0)
		f.num("stride", v.RankStride, 0)
		f.num("axis", int64(v.Axis), 0)
	}
	if b.Port != NoPort {
		f.key("port", b.Port.String())
	}
	f.num("micro", int64(b.Micro), 0)
	if b.Scale != (ScaleOf{}) {
		f.key("scale-of", f.buf(b.Scale.Of))
		f.num("block", b.Scale.Block, 0)
	}
	if len(b.Global) > 0 {
		f.key("global", formatInts(b.Global))
	}
	if len(b.Place) > 0 {
		list := make([]string, len(b.Place))
		for i, pl := range b.Place {
			list[i] = pl.String()
		}
		f.key("place", "["+strings.Join(list, ",")+"]")
	}
	f.end()
}

func (f *formatter) op(op *Op) {
	f.indent()
	f.word(quoteName(op.Name) + ":")
	f.word(quoteName(string(op.Kind)))
	for _, id := range op.In {
		f.word(f.buf(id))
	}
	f.word("->")
	for _, o := range op.Out {
		switch o.Mode {
		case Write:
			f.word(f.buf(o.Buf))
		case Accum:
			f.word("+" + f.buf(o.Buf))
		case ReadWrite:
			f.word("~" + f.buf(o.Buf))
		default:
			f.word("~" + o.Mode.String() + "~" + f.buf(o.Buf))
		}
	}
	if op.Attr != nil {
		f.word(formatAttr(op, op.Attr))
	}
	if op.Stream != Compute {
		f.word("@" + op.Stream.String())
	}
	if op.Work != NoBuf {
		f.key("work", f.buf(op.Work))
	}
	if len(op.Wait) > 0 {
		list := make([]string, len(op.Wait))
		for i, e := range op.Wait {
			list[i] = strconv.Itoa(int(e))
		}
		f.key("wait", strings.Join(list, ","))
	}
	f.num("record", int64(op.Record), 0)
	if op.Pass != Forward {
		f.key("pass", op.Pass.String())
	}
	f.unitOf(op.Unit)
	f.num("micro", int64(op.Micro), 0)
	if op.Source != "" {
		f.key("from", quoteName(op.Source))
	}
	if op.Skip != NoBuf {
		f.key("skip", f.buf(op.Skip))
	}
	f.end()
}

// bareRune says which characters of a name need no quotes.
func bareRune(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '.' || r == '/' || r == '-'
}

func quoteName(s string) string {
	if s != "" && s != "_" && strings.IndexFunc(s, func(r rune) bool { return !bareRune(r) }) < 0 {
		return s
	}
	// < starts a counter of a folded line and must not occur elsewhere.
	return strings.ReplaceAll(strconv.Quote(s), "<", `\x3c`)
}

func formatInts(list []int64) string {
	var b strings.Builder
	b.WriteByte('[')
	for i, v := range list {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatInt(v, 10))
	}
	b.WriteByte(']')
	return b.String()
}

func formatFloat(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }

// attrType returns the type of the operation's attributes, nil for none.
func attrType(op *Op) reflect.Type {
	if in, ok := op.Info(); ok && in.Attr != nil {
		return reflect.TypeOf(in.Attr)
	}
	return nil
}

// formatAttr prints the nonzero fields of attr in order. It adds the type if that is not the kind's
// attribute type.
func formatAttr(op *Op, attr any) string {
	v := reflect.ValueOf(attr)
	head := ""
	if v.Type() != attrType(op) {
		head = v.Type().Name()
		if v.Kind() != reflect.Struct {
			return quoteName(fmt.Sprintf("%T", attr)) + "{}"
		}
	}
	var fields []string
	var walk func(prefix string, v reflect.Value)
	walk = func(prefix string, v reflect.Value) {
		for i := range v.NumField() {
			x := v.Field(i)
			if x.IsZero() {
				continue
			}
			name := prefix + v.Type().Field(i).Name
			switch x.Kind() {
			case reflect.Struct:
				walk(name+".", x)
			case reflect.Float32, reflect.Float64:
				fields = append(fields, name+"="+formatFloat(x.Float()))
			case reflect.String:
				fields = append(fields, name+"="+quoteName(x.String()))
			case reflect.Uint8: // an enumeration, by number
				fields = append(fields, fmt.Sprintf("%s=%d", name, x.Uint()))
			default:
				fields = append(fields, fmt.Sprintf("%s=%v", name, x))
			}
		}
	}
	walk("", v)
	return head + "{" + strings.Join(fields, ",") + "}"
}
