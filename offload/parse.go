package offload

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// classes are the classes that can be placed, in the order in which options are written.
var classes = []graph.Class{graph.Optimizer, graph.Parameters, graph.Gradients, graph.Activations}

// Validate returns an error if an option is out of range.
func (o Options) Validate() error {
	for _, s := range []graph.Space{o.Optimizer, o.Parameters, o.Gradients, o.Activations} {
		if s >= graph.NumSpaces {
			return fmt.Errorf("offload: %v is not a memory space", s)
		}
	}
	switch {
	case o.Ahead < 0:
		return fmt.Errorf("offload: copies begin %d stretches ahead of their use; 0 or more are needed", o.Ahead)
	case o.Chunk < 0 || o.Chunk%1024 != 0:
		return fmt.Errorf("offload: chunks of %d elements; a multiple of 1024 is needed", o.Chunk)
	case !(o.DeviceShare >= 0 && o.DeviceShare <= 1):
		return fmt.Errorf("offload: a share of %g of the optimizer states on the device; a number from 0 to 1 is needed", o.DeviceShare)
	}
	return o.validateParts()
}

// Parse reads "optimizer=host|disk,parameters=…,gradients=…,activations=…", any of them in any
// order. After a space, a colon and the part of the class that goes there may follow. For units the
// part is a share: "optimizer=host:60%" moves at least 60 % of the class off the device (the last
// units stay), "optimizer=host:25%+disk" moves the rest to disk. For activations it is patterns of
// names, as in "activations=host:h.*.mlp.act;h.*.ln_1". "" and "none" offload nothing. Each class
// is given at most once, and each space at most once in a class.
func Parse(s string) (Options, error) {
	var o Options
	if s == "" || strings.EqualFold(s, "none") {
		return o, nil
	}
	given := map[graph.Class]bool{}
	for _, part := range strings.Split(s, ",") {
		name, where, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok {
			return o, fmt.Errorf("%.80q: write CLASS=host or CLASS=disk", part)
		}
		at := slices.IndexFunc(classes, func(c graph.Class) bool { return c.String() == strings.ToLower(name) })
		if at < 0 {
			return o, fmt.Errorf("%.80q: class %.80q is not known; use optimizer, parameters, gradients or activations", part, name)
		}
		class := classes[at]
		if given[class] {
			return o, fmt.Errorf("%.80q: %v is given twice; give it once, its places joined by +, as in optimizer=host:25%%+disk", part, class)
		}
		given[class] = true
		list, err := parseParts(class, where, part)
		if err != nil {
			return o, err
		}
		o = o.With(list)
		if err := o.validateParts(); err != nil {
			return o, fmt.Errorf("%.80q: %w", part, err)
		}
	}
	return o, nil
}

// With adds the parts of one class. A single part with the complete class sets the class's space
// instead. Without parts the options do not change.
func (o Options) With(parts []Part) Options {
	if len(parts) != 1 || parts[0].Share != 0 && parts[0].Share != 1 || len(parts[0].Buffers) > 0 {
		o.Parts = append(slices.Clone(o.Parts), parts...)
		return o
	}
	*o.space(parts[0].Class) = parts[0].Space
	return o
}

// String formats the options for Parse; "" if nothing leaves the device.
func (o Options) String() string {
	var texts []string
	for _, c := range classes {
		var places []string
		if s := o.Whole(c); s != graph.Device {
			places = append(places, s.String())
		}
		for _, p := range o.parts(c) {
			text := p.Space.String()
			switch {
			case p.Share > 0:
				text += ":" + strconv.FormatFloat(math.Round(p.Share*1e12)/1e10, 'f', -1, 64) + "%"
			case len(p.Buffers) > 0:
				text += ":" + strings.Join(p.Buffers, ";")
			}
			places = append(places, text)
		}
		if len(places) > 0 {
			texts = append(texts, c.String()+"="+strings.Join(places, "+"))
		}
	}
	return strings.Join(texts, ",")
}
