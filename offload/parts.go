package offload

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/decimal"
)

// Part is a part of a class of buffers, and the space to which it moves.
type Part struct {
	Class graph.Class // Optimizer, Parameters, Gradients or Activations
	Space graph.Space // Host or Disk
	// Share is the share of a class of units' buffers, by bytes, that goes to Space, in (0, 1]. 0:
	// everything that later parts leave. If a class has several parts, the later ones get the later
	// units. The last units, which no part gets, stay on the device. Only complete units move, so
	// at least the sum of the shares leaves the device.
	Share float64
	// Buffers has patterns (graph.MatchName) of the activations that go to Space; none: all
	// activations that earlier parts leave.
	Buffers []string
}

func (p Part) validate() error {
	switch p.Class {
	case graph.Optimizer, graph.Parameters, graph.Gradients:
		if len(p.Buffers) > 0 {
			return fmt.Errorf("offload: %v goes by units, not by buffers %.80q; give a share, as in optimizer=host:60%%", p.Class, p.Buffers)
		}
	case graph.Activations:
		if p.Share != 0 {
			return fmt.Errorf("offload: activations go by buffers, not by shares; give patterns of names, as in activations=host:h.*.mlp.act")
		}
	default:
		return fmt.Errorf("offload: %v is not a class that can be placed", p.Class)
	}
	if p.Space != graph.Host && p.Space != graph.Disk {
		return fmt.Errorf("offload: %v is not a place; use host or disk", p.Space)
	}
	if !(p.Share >= 0 && p.Share <= 1) {
		return fmt.Errorf("offload: a share of %g; a number over 0 and up to 1 is needed", p.Share)
	}
	for _, b := range p.Buffers {
		if err := graph.CheckPattern(b); err != nil {
			return fmt.Errorf("offload: %w", err)
		}
	}
	return nil
}

// validateParts rejects parts that contradict each other or the space of a complete class.
func (o Options) validateParts() error {
	sum := map[graph.Class]float64{}
	rest := map[graph.Class]bool{}
	for _, p := range o.Parts {
		if err := p.validate(); err != nil {
			return err
		}
		if o.Whole(p.Class) != graph.Device {
			return fmt.Errorf("offload: %v is placed whole and in parts; leave one of them out", p.Class)
		}
		if rest[p.Class] {
			return fmt.Errorf("offload: a part of %v comes after the one that takes all the rest", p.Class)
		}
		rest[p.Class] = p.Share == 0 && len(p.Buffers) == 0
		if sum[p.Class] += p.Share; sum[p.Class] > 1+1e-9 {
			return fmt.Errorf("offload: the shares of %v come to %g %%; 100 %% is all of it", p.Class, math.Round(sum[p.Class]*1e4)/1e2)
		}
	}
	return nil
}

// Whole returns the space of a complete class; graph.Device if it stays, or if it is placed in
// parts.
func (o Options) Whole(c graph.Class) graph.Space {
	if space := o.space(c); space != nil {
		return *space
	}
	return graph.Device
}

// space returns the option for a complete class; nil if the class can't be placed.
func (o *Options) space(c graph.Class) *graph.Space {
	switch c {
	case graph.Optimizer:
		return &o.Optimizer
	case graph.Parameters:
		return &o.Parameters
	case graph.Gradients:
		return &o.Gradients
	case graph.Activations:
		return &o.Activations
	}
	return nil
}

func (o Options) parts(c graph.Class) (list []Part) {
	for _, p := range o.Parts {
		if p.Class == c {
			list = append(list, p)
		}
	}
	return list
}

// placeUnits returns, by unit, the home of its buffers of a class. bytes has the size of these by
// unit.
func (o Options) placeUnits(c graph.Class, bytes []int64) []graph.Space {
	home := make([]graph.Space, len(bytes))
	parts := o.parts(c)
	if s := o.Whole(c); s != graph.Device {
		parts = []Part{{Class: c, Space: s, Share: 1}}
		if c == graph.Optimizer {
			if o.DeviceShare == 1 {
				return home
			}
			parts[0].Share -= o.DeviceShare
		}
	}
	if len(parts) == 0 {
		return home
	}
	var total int64
	for _, n := range bytes {
		total += n
	}
	// The last units stay on the device, the ones before them go to the last part, and so on
	// back to the first.
	stay := 1.0
	for _, p := range parts {
		stay -= p.Share
	}
	if last := parts[len(parts)-1]; last.Share == 0 {
		stay = 0
	}
	left := make([]float64, len(parts)+1) // remaining bytes of each part; the last element is the device's
	left[len(parts)] = stay * float64(total)
	named := stay
	for i, p := range parts {
		left[i] = p.Share * float64(total)
		named += p.Share
	}
	if last := len(parts) - 1; parts[last].Share == 0 {
		left[last] = (1 - named) * float64(total)
	}
	const rounding = 1e-6 // of the total: shares are decimal fractions
	for u := len(bytes) - 1; u >= 0; u-- {
		n := float64(bytes[u])
		if n == 0 {
			continue
		}
		at := 0
		for k := len(parts); k > 0; k-- {
			if n <= left[k]+float64(rounding*float64(total)) {
				at = k
				break
			}
		}
		left[at] -= n
		if at < len(parts) {
			home[u] = parts[at].Space
		}
	}
	return home
}

// parkSpace returns the space for an activation of the given name; Device if it stays.
func (o Options) parkSpace(name string) graph.Space {
	for _, p := range o.parts(graph.Activations) {
		if len(p.Buffers) == 0 || p.names(name) {
			return p.Space
		}
	}
	return o.Activations
}

// parks says whether any activation may leave the device.
func (o Options) parks() bool {
	return o.Activations != graph.Device || len(o.parts(graph.Activations)) > 0
}

// named says whether a pattern names the activation. It is then parked regardless of its size.
func (o Options) named(name string) bool {
	return slices.ContainsFunc(o.parts(graph.Activations), func(p Part) bool { return p.names(name) })
}

// names says whether one of the part's patterns names the activation.
func (p Part) names(name string) bool {
	return slices.ContainsFunc(p.Buffers, func(pattern string) bool {
		ok, _ := graph.MatchName(pattern, name)
		return ok
	})
}

// parseParts reads SPACE[:PART][+SPACE[:PART]…] for a class.
func parseParts(class graph.Class, text, whole string) ([]Part, error) {
	var list []Part
	for _, one := range strings.Split(text, "+") {
		place, what, by := strings.Cut(one, ":")
		p := Part{Class: class}
		switch strings.ToLower(strings.TrimSpace(place)) {
		case "host":
			p.Space = graph.Host
		case "disk":
			p.Space = graph.Disk
		default:
			return nil, fmt.Errorf("%.80q: %.80q is not a place; use host or disk", whole, place)
		}
		what = strings.TrimSpace(what)
		switch percent, isShare := strings.CutSuffix(what, "%"); {
		case !by:
		case isShare && class != graph.Activations:
			v, err := decimal.Float(strings.TrimSpace(percent))
			if err != nil || !(v > 0 && v <= 100) {
				return nil, fmt.Errorf("%.80q: %.80q is not a share of the class; write a percentage over 0 and up to 100, as in %v=host:60%%", whole, what, class)
			}
			p.Share = v / 100
		case class == graph.Activations && !isShare:
			for _, b := range strings.Split(what, ";") {
				p.Buffers = append(p.Buffers, strings.TrimSpace(b))
			}
		case class == graph.Activations:
			return nil, fmt.Errorf("%.80q: activations go by buffers, not by shares; write patterns of names separated by semicolons, as in activations=host:h.*.mlp.act;h.*.ln_1", whole)
		default:
			return nil, fmt.Errorf("%.80q: %v goes by units, and %.80q is not a share; write a percentage, as in %v=host:60%%", whole, class, what, class)
		}
		if err := p.validate(); err != nil {
			return nil, fmt.Errorf("%.80q: %w", whole, err)
		}
		if slices.ContainsFunc(list, func(q Part) bool { return q.Space == p.Space }) {
			return nil, fmt.Errorf("%.80q: %v is given twice; give each place once, with all that goes there", whole, p.Space)
		}
		list = append(list, p)
	}
	return list, nil
}
