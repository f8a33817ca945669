package planner

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/model"
)

// modelShape reads the model's shape. For a program's own model, the shape has only positions and
// vocabulary.
func (q *Request) modelShape(sh *config.Shared) (model.Config, error) {
	c := &q.Config
	if c.Own.Model == nil && q.Opened != nil {
		return q.Opened.Config()
	}
	if c.Own.Model == nil {
		return ModelConfig(c.Model)
	}
	h := model.Config{Positions: c.Own.Model.Positions}
	if h.Positions == 0 {
		h.Positions = math.MaxInt32
	}
	s := data.Shape{}
	if c.Seq <= h.Positions {
		p, err := sh.Own(c.Own.Model, model.Train, c.Batch, c.Seq)
		if err != nil {
			return h, err
		}
		BoundsOf(&s, p)
	}
	h.Vocab = min(s.Vocab, s.Classes) // a file's tokens are both inputs and classes
	return h, nil
}

// modelAdapters returns the adapters with which the model of Config.Model was trained.
func (q *Request) modelAdapters() (o lora.Options, err error) {
	if q.Own.Model != nil {
		return o, nil
	}
	m := q.Opened
	if m == nil {
		if _, err := presetConfig(q.Model); err == nil {
			return o, nil
		}
		if m, err = OpenModel(context.Background(), q.Model, model.ConfigFile); err != nil {
			return o, fmt.Errorf("Config.Model %s: %w", q.Model, err)
		}
		defer func() { err = errors.Join(err, m.Close()) }()
	}
	return m.Adapters()
}

// SampleShape returns the shape of a sample, one of the rows of the plan's program.
func SampleShape(p *graph.Program, rows int) (s data.Shape) {
	size := func(id graph.BufID) int {
		if id == graph.NoBuf {
			return 0
		}
		return int(p.Buf(id).Elems()) / rows
	}
	s.Tokens, s.Targets = size(p.Port(graph.PortTokens)), size(p.Port(graph.PortTargets))
	for _, id := range p.InputsOf(0) {
		s.Inputs = append(s.Inputs, data.InputSize{Name: p.Buf(id).InputName(), Elems: size(id)})
	}
	return s
}

// BoundsOf sets a shape's bounds of tokens and targets, from the operations of the model's forward
// that read them.
func BoundsOf(s *data.Shape, p *graph.Program) {
	least := func(have *int, n int64) {
		if *have == 0 || int(n) < *have {
			*have = int(n)
		}
	}
	for i := range p.Sections[0].Phases[0].Ops {
		op := &p.Sections[0].Phases[0].Ops[i]
		switch op.Kind {
		case graph.Embed:
			if root, _ := p.Resolve(op.In[0], nil); root == p.Tokens {
				least(&s.Vocab, p.Buf(op.In[1]).Shape[0])
			}
		case graph.CrossEntropy:
			shape := p.Buf(op.In[0]).Shape
			least(&s.Classes, shape[len(shape)-1])
		case graph.HeadLoss:
			least(&s.Classes, p.Buf(op.In[1]).Shape[0])
		}
	}
}

// Runnable returns an error for a model that can be planned for a device but not run there.
func Runnable(c *config.Config) error {
	if !strings.EqualFold(c.Device, "cuda") || c.Own.Model != nil {
		return nil
	}
	m, err := ModelConfig(c.Model)
	if err != nil {
		return nil // the error is reported where the run reads the model
	}
	if why := m.Arch().CPUOnly; why != "" {
		return config.RefuseField("Device", "Config.Device cuda with model_type %s: %s; use Config.Device cpu", m.Family, why)
	}
	return nil
}
