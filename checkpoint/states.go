package checkpoint

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"path/filepath"
	"slices"

	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
)

// Tensors presents one state's tensors as complete tensors, whichever files hold their extents.
type Tensors interface {
	Tensors() []safetensors.Tensor
	Tensor(name string) (safetensors.Tensor, bool)
	// ReadFloat32 fills dst with elements [start, start+len(dst)) of a tensor.
	ReadFloat32(name string, start int64, dst []float32) error
	Close() error
}

// located is an extent and its place in a file.
type located struct {
	Extent
	file int
	at   int64 // byte of the file
	sum  uint32
}

// States reads a checkpoint by logical tensor and element. Each extent is compared with its
// checksum while it is read.
type States struct {
	folder  string
	c       *Checkpoint
	m       Manifest
	names   []string // of the files, paths
	files   []filesys.File
	extents map[string]map[string][]located // by state and tensor, ascending
	scales  cached
}

// cached holds the scale extent that was read last. Codes are read in order, so it usually
// serves the next read.
type cached struct {
	of     located
	values []float32
}

// States opens the ranks' files and compares their headers with the manifest, and their extents
// with its list of tensors. Errors wrap ErrDamaged.
func (c *Checkpoint) States() (*States, error) {
	s := &States{folder: c.Folder, c: c, m: c.Manifest, extents: map[string]map[string][]located{}}
	for _, f := range s.m.Files {
		if f.Header == 0 {
			continue
		}
		if err := s.open(f); err != nil {
			return nil, err
		}
	}
	for _, tensors := range s.extents {
		for _, list := range tensors {
			slices.SortFunc(list, func(a, b located) int { return cmp.Compare(a.Start, b.Start) })
		}
	}
	if err := s.complete(); err != nil {
		return nil, err
	}
	return s, nil
}

// open reads the header of a rank's file.
func (s *States) open(want File) error {
	path := filepath.Join(s.folder, want.Name)
	f, err := s.c.file(want)
	if err != nil {
		return err
	}
	s.files, s.names = append(s.files, f), append(s.names, path)
	header := make([]byte, want.Header)
	if _, err := f.ReadAt(header, 0); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrDamaged, path, err)
	}
	if got := sum(header); got != want.CRC32C {
		return fmt.Errorf("%w: %s has CRC-32C %s in its header; the manifest says %s", ErrDamaged, path, got, want.CRC32C)
	}
	l, err := safetensors.ReadLayout(f, want.Bytes)
	if err != nil {
		return fmt.Errorf("%w: %s: %w", ErrDamaged, path, err)
	}
	sums, err := hex.DecodeString(l.Metadata[sumsKey])
	if err != nil || len(sums) != 4*len(l.Tensors) || l.Data != want.Header {
		return fmt.Errorf("%w: %s has no checksum for each of its %d extents", ErrDamaged, path, len(l.Tensors))
	}
	for i, t := range l.Tensors {
		e, err := extentOf(t)
		if err != nil {
			return fmt.Errorf("%w: %s: %w", ErrDamaged, path, err)
		}
		if s.extents[e.State] == nil {
			s.extents[e.State] = map[string][]located{}
		}
		b := sums[4*i:]
		crc := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
		s.extents[e.State][e.Tensor] = append(s.extents[e.State][e.Tensor], located{e, len(s.files) - 1, l.Begin[i], crc})
	}
	return nil
}

// complete checks that the extents of every state cover its tensors exactly once, and that no
// other extents exist.
func (s *States) complete() error {
	known := 0
	for i := range s.m.Tensors {
		t := &s.m.Tensors[i]
		for _, state := range t.States {
			list := s.extents[state][t.Name]
			if err := s.tiles(t.Elements(state), list, state, t.Name); err != nil {
				return err
			}
			known++
			if list[0].DType != scaledDType {
				continue
			}
			blocks := (t.Elements(state) + QuantBlock - 1) / QuantBlock
			if err := s.tiles(blocks, s.extents[state+ScaleSuffix][t.Name], state+ScaleSuffix, t.Name); err != nil {
				return err
			}
			known++
		}
	}
	found := 0
	for _, tensors := range s.extents {
		found += len(tensors)
	}
	if found != known {
		return fmt.Errorf("%w: %s holds states that its manifest does not list", ErrDamaged, s.folder)
	}
	return nil
}

// tiles checks that a list of extents covers n elements exactly once, in one dtype.
func (s *States) tiles(n int64, list []located, state, tensor string) error {
	at := int64(0)
	for _, e := range list {
		if e.Start != at || e.DType != list[0].DType {
			break
		}
		at += e.N
	}
	if len(list) == 0 || at != n || list[len(list)-1].Start+list[len(list)-1].N != n {
		return fmt.Errorf("%w: %s does not hold %s of %q whole: %d of %d elements from the first on", ErrDamaged, s.folder, state, tensor, at, n)
	}
	return nil
}

// Close does nothing: the Checkpoint owns the files.
func (s *States) Close() error { return nil }

// Bytes returns the stored bytes of a tensor's state: elements of its dtype, or 8-bit codes,
// whose scales are the state with ScaleSuffix.
func (s *States) Bytes(state, tensor string) ([]byte, error) {
	var all []byte
	for i := range s.extents[state][tensor] {
		e := &s.extents[state][tensor][i]
		b := make([]byte, e.Bytes())
		if err := s.raw(e, b); err != nil {
			return nil, err
		}
		all = append(all, b...)
	}
	if all == nil {
		return nil, fmt.Errorf("read %s: there is no %s of %.80q", s.folder, state, tensor)
	}
	return all, nil
}

// find returns the index in a list of the extent that holds an element.
func find(list []located, element int64) int {
	i, found := slices.BinarySearchFunc(list, element, func(e located, at int64) int { return cmp.Compare(e.Start, at) })
	if !found {
		i--
	}
	return i
}

// raw reads a whole extent into b and compares it with its checksum.
func (s *States) raw(e *located, b []byte) error {
	if _, err := s.files[e.file].ReadAt(b, e.at); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrDamaged, s.names[e.file], err)
	}
	return s.check(e, b)
}

func (s *States) check(e *located, b []byte) error {
	if got := crc32.Checksum(b, castagnoli); got != e.sum {
		return fmt.Errorf("%w: %s has CRC-32C %08x in %s of %q, elements %d to %d; it says %08x", ErrDamaged, s.names[e.file], got, e.State, e.Tensor, e.Start, e.Start+e.N, e.sum)
	}
	return nil
}

// scalesOf returns the scales of blocks [first, first+n) of a state in 8 bits.
func (s *States) scalesOf(state, tensor string, first, n int64) ([]float32, error) {
	out := make([]float32, 0, n)
	list := s.extents[state+ScaleSuffix][tensor]
	for n > 0 {
		e := &list[find(list, first)]
		if s.scales.values == nil || s.scales.of != *e {
			s.scales.values = nil
			b := make([]byte, e.Bytes())
			if err := s.raw(e, b); err != nil {
				return nil, err
			}
			v := make([]float32, e.N)
			if err := safetensors.Decode(v, b, e.DType); err != nil {
				return nil, fmt.Errorf("%w: %s: %w", ErrDamaged, s.names[e.file], err)
			}
			s.scales = cached{*e, v}
		}
		k := min(n, e.Start+e.N-first)
		out = append(out, s.scales.values[first-e.Start:first-e.Start+k]...)
		first, n = first+k, n-k
	}
	return out, nil
}

// stateView presents one state of a checkpoint as whole tensors.
type stateView struct {
	*States
	state string
	last  cached // the extent that was read last
	bytes []byte
}

// State returns one state's tensors. They share the checkpoint's files; closing the result does
// not close those.
func (s *States) State(name string) Tensors { return &stateView{States: s, state: name} }

// Tensors lists the tensors in the manifest's order.
func (v *stateView) Tensors() (list []safetensors.Tensor) {
	for i := range v.m.Tensors {
		if t, ok := v.Tensor(v.m.Tensors[i].Name); ok {
			list = append(list, t)
		}
	}
	return list
}

func (v *stateView) Tensor(name string) (safetensors.Tensor, bool) {
	t := v.m.tensor(name)
	if t == nil || !slices.Contains(t.States, v.state) {
		return safetensors.Tensor{}, false
	}
	shape := slices.Clone(t.Shape)
	if t.scalar(v.state) {
		shape = []int64{1}
	}
	return safetensors.Tensor{Name: name, DType: v.extents[v.state][name][0].DType, Shape: shape}, true
}

func (v *stateView) ReadFloat32(name string, start int64, dst []float32) error {
	t, ok := v.Tensor(name)
	switch {
	case !ok:
		return fmt.Errorf("read %s: there is no %s of %.80q", v.folder, v.state, name)
	case start < 0 || start > t.Elements()-int64(len(dst)):
		return fmt.Errorf("read %s: %s of %q has %d elements; %d from %d are outside of it", v.folder, v.state, name, t.Elements(), len(dst), start)
	case t.DType == scaledDType && v.state != ModelState:
		return fmt.Errorf("read %s: %s of %q is in 8 bits; resume with the 8-bit optimizer that wrote it", v.folder, v.state, name)
	}
	list := v.extents[v.state][name]
	for len(dst) > 0 {
		e := &list[find(list, start)]
		if v.last.values == nil || v.last.of != *e {
			v.last.values = nil
			if v.bytes == nil {
				v.bytes = make([]byte, ExtentBytes)
			}
			if err := v.raw(e, v.bytes[:e.Bytes()]); err != nil {
				return err
			}
			x, err := v.decode(e, v.bytes[:e.Bytes()])
			if err != nil {
				return err
			}
			v.last = cached{*e, x}
		}
		k := copy(dst, v.last.values[start-e.Start:])
		dst, start = dst[k:], start+int64(k)
	}
	return nil
}

// decode turns an extent's bytes into values.
func (v *stateView) decode(e *located, b []byte) ([]float32, error) {
	x := make([]float32, e.N)
	if e.DType != scaledDType {
		return x, safetensors.Decode(x, b, e.DType)
	}
	scales, err := v.scalesOf(e.State, e.Tensor, e.Start/QuantBlock, (e.N+QuantBlock-1)/QuantBlock)
	for i, scale := range scales {
		lo, hi := i*QuantBlock, min((i+1)*QuantBlock, len(x))
		dequantizeModel(x[lo:hi], b[lo:hi], scale)
	}
	return x, err
}

// dequantizeModel reads a block of parameters in int8: code·scale.
func dequantizeModel(dst []float32, codes []byte, scale float32) {
	for i := range dst {
		dst[i] = float32(int8(codes[i])) * scale
	}
}

// State opens the tensors of one state of a checkpoint of any version. Tensors of versions 1
// and 2 are read without a check; only Verify compares them with the manifest.
func (c *Checkpoint) State(name string) (Tensors, error) {
	if c.Manifest.Version >= sharded {
		s, err := c.States()
		if err != nil {
			return nil, err
		}
		return s.State(name), nil
	}
	want, ok := c.Manifest.file(name + tensorsExt)
	if !ok {
		return nil, fmt.Errorf("%w: %s has no %s", ErrDamaged, c.Folder, name+tensorsExt)
	}
	return c.Tensors(want)
}

// Tensors opens a safetensors file of the checkpoint without a checksum check.
func (c *Checkpoint) Tensors(want File) (Tensors, error) {
	f, err := c.file(want)
	if err != nil {
		return nil, err
	}
	return safetensors.OpenAs(filepath.Join(c.Folder, want.Name), f, want.Bytes)
}
