package data

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"slices"

	"github.com/spillway-ml/spillway/data/sample"
)

// Types of a data set that a program provides; package sample describes them.
type (
	// Samples is a data set: Len() int64 and Sample(i int64, r *Row) error.
	Samples = sample.Samples
	// TargetCounter is Samples that count their targets: CountTargets(i int64) int.
	TargetCounter = sample.TargetCounter
	// Row is the memory for a sample: its Tokens, Targets and Input(name).
	Row = sample.Row
	// Input is a model's float input: its Name and Values.
	Input = sample.Input
)

// Shape describes one sample as the model's input; sizes are per sample.
type Shape struct {
	Tokens, Targets int
	Inputs          []InputSize
	Vocab           int // tokens are below it; 0: any
	Classes         int // targets are below it; 0: any
}

// InputSize is the number of elements of a float input.
type InputSize struct {
	Name  string
	Elems int
}

// Micro is the memory for a micro-batch, row by row.
type Micro struct {
	Tokens, Targets []int32
	Inputs          [][]float32 // in the order of Shape.Inputs
}

// NewMicro allocates a Micro of the given number of rows.
func (s *Shape) NewMicro(rows int) *Micro {
	m := &Micro{Tokens: make([]int32, rows*s.Tokens), Targets: make([]int32, rows*s.Targets)}
	for _, in := range s.Inputs {
		m.Inputs = append(m.Inputs, make([]float32, rows*in.Elems))
	}
	return m
}

// row returns the k-th row of m, cleared.
func (s *Shape) row(m *Micro, k int) *Row {
	r := &Row{Tokens: m.Tokens[k*s.Tokens : (k+1)*s.Tokens], Targets: m.Targets[k*s.Targets : (k+1)*s.Targets]}
	clear(r.Tokens)
	for i := range r.Targets {
		r.Targets[i] = -1
	}
	for i, in := range s.Inputs {
		v := m.Inputs[i][k*in.Elems : (k+1)*in.Elems]
		clear(v)
		r.Inputs = append(r.Inputs, Input{Name: in.Name, Values: v})
	}
	return r
}

// SampleReader reads micro-batches of Samples in the order of a Sampler.
type SampleReader struct {
	*Sampler
	samples Samples
	shape   Shape
}

// NewSampleReader is NewSampler for samples; c.Seq and c.Vocab are ignored. rows is the number of
// samples of an epoch, at least Samples.Len. Samples from Len on have no targets.
func NewSampleReader(s Samples, shape Shape, rows int64, c SamplerConfig) (*SampleReader, error) {
	if n := s.Len(); n < 1 {
		return nil, fmt.Errorf("sample data: Len is %d, want at least 1 sample", n)
	}
	for _, of := range append([]RowsFrom{{0, c.StepRows}}, c.Later...) {
		if of.Rows%max(c.Batch, 1) != 0 && shape.Targets == 0 {
			return nil, fmt.Errorf("sample data: a step of %d rows in micro-batches of %d has padding, which a model without targets can't leave out; give a multiple", of.Rows, c.Batch)
		}
	}
	c.Seq, c.Vocab = 1, 0
	sampler, err := NewSampler(sampleCount(max(rows, s.Len())), c)
	if err != nil {
		return nil, err
	}
	return &SampleReader{sampler, s, shape}, nil
}

// sampleCount is a Source with one window per sample; it has no tokens.
type sampleCount int64

func (n sampleCount) Len() int64 { return int64(n) + 1 }

func (n sampleCount) Tokens([]int32, int64) error {
	return fmt.Errorf("sample data: samples are not tokens")
}

// FillSamples writes a rank's micro-batch.
func (r *SampleReader) FillSamples(step, micro, rank int, m *Micro) error {
	for k := range r.c.Batch {
		row := r.shape.row(m, k)
		if r.IsPadding(step, micro, rank, k) {
			continue
		}
		if err := r.fill(r.Start(step, micro, rank, k), row); err != nil {
			return err
		}
	}
	return nil
}

// fill writes a sample and checks its tokens and targets.
func (r *SampleReader) fill(i int64, row *Row) error {
	if i >= r.samples.Len() {
		return nil
	}
	if err := r.samples.Sample(i, row); err != nil {
		return fmt.Errorf("sample %d: %w", i, err)
	}
	for k, t := range row.Tokens {
		if t < 0 || r.shape.Vocab > 0 && int(t) >= r.shape.Vocab {
			return fmt.Errorf("sample %d: token %d is %d, want 0 to %d", i, k, t, orAny(r.shape.Vocab)-1)
		}
	}
	for k, t := range row.Targets {
		if t < -1 || r.shape.Classes > 0 && int(t) >= r.shape.Classes {
			return fmt.Errorf("sample %d: target %d is %d, want -1 to %d", i, k, t, orAny(r.shape.Classes)-1)
		}
	}
	return nil
}

func orAny(n int) int {
	if n == 0 {
		return math.MaxInt32
	}
	return n
}

// CountTargets returns the counted targets of a step.
func (r *SampleReader) CountTargets(step int) (sum Counted, err error) {
	counter, counts := r.samples.(TargetCounter)
	one := r.shape.NewMicro(1)
	err = r.EachMicro(step, func(micro, rank int) error {
		n := int64(0)
		for k := range r.c.Batch {
			i := r.Start(step, micro, rank, k)
			switch {
			case i >= r.samples.Len() || r.IsPadding(step, micro, rank, k):
				continue
			case r.shape.Targets == 0:
				n++
				continue
			case counts:
				n += int64(counter.CountTargets(i))
				continue
			}
			row := r.shape.row(one, 0)
			if err := r.fill(i, row); err != nil {
				return err
			}
			for _, t := range row.Targets {
				if t >= 0 {
					n++
				}
			}
		}
		sum.Add(n)
		return nil
	})
	return sum, err
}

// fingerprintSamples is the number of samples that Fingerprint reads.
const fingerprintSamples = 64

// Fingerprint identifies the samples: by their number (in its field Tokens), and by a hash of
// the tokens, targets and inputs of 64 of them, evenly spaced from the first to the last.
func (r *SampleReader) Fingerprint() (Fingerprint, error) {
	h := sha256.New()
	n := r.samples.Len()
	one := r.shape.NewMicro(1)
	blocks := min(n, fingerprintSamples)
	var bytes []byte
	for k := range blocks {
		i := int64(0)
		if blocks > 1 {
			gap, rest := (n-1)/(blocks-1), (n-1)%(blocks-1)
			i = k*gap + k*rest/(blocks-1)
		}
		row := r.shape.row(one, 0)
		if err := r.fill(i, row); err != nil {
			return Fingerprint{}, err
		}
		bytes = binary.LittleEndian.AppendUint64(bytes[:0], uint64(i))
		for _, t := range slices.Concat(row.Tokens, row.Targets) {
			bytes = binary.LittleEndian.AppendUint32(bytes, uint32(t))
		}
		for _, in := range row.Inputs {
			for _, v := range in.Values {
				bytes = binary.LittleEndian.AppendUint32(bytes, math.Float32bits(v))
			}
		}
		_, _ = h.Write(bytes) // a hash never fails
	}
	return Fingerprint{n, hex.EncodeToString(h.Sum(nil))}, nil
}
