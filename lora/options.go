// Package lora adds low-rank adapters to a model's forward programs (Hu et al., LoRA:
// Low-Rank Adaptation of Large Language Models, 2021). The model's own parameters are
// frozen; the adapters are trained.
package lora

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// Options say which products have adapters. The zero value means none.
type Options struct {
	Rank    int      // r, the inner dimension of an adapter; 0: no adapters
	Alpha   float64  // the adapter's product is scaled by Alpha/Rank
	Targets []string // patterns of weight names, as in graph.MatchName; none: all products in repeated blocks
	Dropout float64  // of the adapter's input, in training
}

// maxRank bounds the rank: a larger one must be a typing error.
const maxRank = 1 << 16

// Active says whether there are adapters.
func (o Options) Active() bool { return o.Rank != 0 }

// Factor returns the scale of an adapter's product.
func (o Options) Factor() float64 { return o.Alpha / float64(o.Rank) }

// Validate refuses values that no adapter can have.
func (o Options) Validate() error {
	switch {
	case o.Rank < 1 || o.Rank > maxRank:
		return fmt.Errorf("r is %d; it must be from 1 to %d", o.Rank, maxRank)
	case !(o.Alpha > 0) || math.IsInf(o.Alpha, 0):
		return fmt.Errorf("alpha is %g; it must be a finite number above 0", o.Alpha)
	case !(o.Dropout >= 0 && o.Dropout < 1):
		return fmt.Errorf("dropout is %g; it must be in [0, 1)", o.Dropout)
	}
	for _, t := range o.Targets {
		if err := graph.CheckPattern(t); err != nil {
			return fmt.Errorf("targets: %w", err)
		}
	}
	return nil
}

// String formats o as Parse reads it; "" if there are no adapters.
func (o Options) String() string {
	if !o.Active() {
		return ""
	}
	number := func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
	s := fmt.Sprintf("r=%d,alpha=%s", o.Rank, number(o.Alpha))
	if len(o.Targets) > 0 {
		s += ",targets=" + strings.Join(o.Targets, ",")
	}
	if o.Dropout > 0 {
		s += ",dropout=" + number(o.Dropout)
	}
	return s
}

// Parse reads "r=16,alpha=32,targets=*.attn.*,*.mlp.*,dropout=0", in any order. All but r are
// optional; the default of alpha is twice r. Items without a key are further targets. "" and
// "none" mean no adapters.
func Parse(s string) (o Options, err error) {
	if s == "" || strings.EqualFold(s, "none") {
		return o, nil
	}
	last, given := "", map[string]bool{}
	for _, part := range strings.Split(s, ",") {
		key, value, named := strings.Cut(part, "=")
		if !named && last == "targets" {
			key, value = last, part
		} else if given[key] {
			return Options{}, fmt.Errorf("%s is given twice", key)
		}
		last, given[key] = key, true
		value = strings.TrimSpace(value)
		switch key {
		case "r":
			o.Rank, err = strconv.Atoi(value)
		case "alpha":
			o.Alpha, err = strconv.ParseFloat(value, 64)
		case "dropout":
			o.Dropout, err = strconv.ParseFloat(value, 64)
		case "targets":
			o.Targets = append(o.Targets, value)
		default:
			return Options{}, fmt.Errorf("%.80q is not known; write r=16, or r=16,alpha=32,targets=*.mlp.*", part)
		}
		if err != nil {
			return Options{}, fmt.Errorf("%s is %.80q; it must be a number", key, value)
		}
	}
	if !given["alpha"] {
		o.Alpha = 2 * float64(o.Rank)
	}
	return o, o.Validate()
}
