package model

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// Largest accepted values: several times those of published models, and small enough that a
// product of any three cannot overflow an int64.
const (
	mostLayers    = 10_000
	mostHeads     = 1 << 16
	mostWidth     = 1 << 20
	mostFFN       = 1 << 23
	mostVocab     = 1 << 24
	mostPositions = 1 << 26
	mostRopeTheta = 1e12
)

// object is a JSON object whose reads keep the first error. A null key counts as absent, as in
// transformers, except in has.
type object struct {
	keys map[string]json.RawMessage
	read map[string]bool // keys that the architecture has asked for
	err  error
}

func parseObject(data []byte) (*object, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	keys := map[string]json.RawMessage{}
	if err := dec.Decode(&keys); err != nil {
		var syntax *json.SyntaxError
		switch {
		case errors.As(err, &syntax):
			return nil, fmt.Errorf("not JSON at byte %d: %w", syntax.Offset, err)
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return nil, errors.New("the JSON ends early; a config.json is one object")
		}
		return nil, fmt.Errorf("not a JSON object: %w", err)
	}
	if keys == nil {
		return nil, errors.New("the JSON is null; a config.json is one object")
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("text follows the JSON object at byte %d", dec.InputOffset())
	}
	return &object{keys: keys, read: map[string]bool{}}, nil
}

func (o *object) failf(format string, args ...any) {
	if o.err == nil {
		o.err = fmt.Errorf(format, args...)
	}
}

// has says whether the key exists, even if it is null.
func (o *object) has(key string) bool { _, ok := o.keys[key]; return ok }

// raw returns the text of a key's value, or nil if it is absent or null.
func (o *object) raw(key string) json.RawMessage {
	o.read[key] = true
	v := bytes.TrimSpace(o.keys[key])
	if len(v) == 0 || string(v) == "null" {
		return nil
	}
	return v
}

// missing reports a missing required key. If the file has the key in another letter case, the
// error names that.
func (o *object) missing(key string) {
	for _, k := range slices.Sorted(maps.Keys(o.keys)) {
		if k != key && strings.EqualFold(k, key) {
			o.failf("required key %q is missing (it has %q)", key, k)
			return
		}
	}
	if o.has(key) {
		o.failf("required key %q is null", key)
		return
	}
	o.failf("required key %q is missing", key)
}

func (o *object) requiredInt(key string, limit int64) int {
	if o.raw(key) == nil {
		o.missing(key)
		return 0
	}
	return o.int(key, 0, limit)
}

// int reads an integer from 1 to limit. The default may be outside that range.
func (o *object) int(key string, def int, limit int64) int {
	v := o.raw(key)
	if v == nil {
		return def
	}
	n, err := strconv.ParseInt(string(v), 10, 64)
	if err != nil || n < 1 || n > limit {
		o.failf("%s is %s; it must be an integer from 1 to %d", key, shorten(v), limit)
		return def
	}
	return int(n)
}

func (o *object) requiredPositive(key string, limit float64) float64 {
	if o.raw(key) == nil {
		o.missing(key)
		return 0
	}
	return o.positive(key, 0, limit)
}

// positive reads a number over 0 and at most limit.
func (o *object) positive(key string, def, limit float64) float64 {
	v := o.raw(key)
	if v == nil {
		return def
	}
	var x float64
	if err := json.Unmarshal(v, &x); err != nil || math.IsNaN(x) || x <= 0 || x > limit {
		o.failf("%s is %s; it must be a number over 0 and at most %g", key, shorten(v), limit)
		return def
	}
	return x
}

func (o *object) bool(key string, def bool) bool {
	switch v := o.raw(key); string(v) {
	case "":
		return def
	case "true":
		return true
	case "false":
		return false
	default:
		o.failf("%s is %s; it must be true or false", key, shorten(v))
		return def
	}
}

// mustBe refuses a switch whose value is not supported.
func (o *object) mustBe(key string, def, want bool, why string) {
	if got := o.bool(key, def); o.err == nil && got != want {
		o.failf("%s is %v: %s; it must be %v", key, got, why, want)
	}
}

func (o *object) requiredString(key string) string {
	if o.raw(key) == nil {
		o.missing(key)
		return ""
	}
	return o.string(key, "")
}

func (o *object) string(key, def string) string {
	v := o.raw(key)
	if v == nil {
		return def
	}
	var s string
	if err := json.Unmarshal(v, &s); err != nil {
		o.failf("%s is %s; it must be a string", key, shorten(v))
		return def
	}
	return s
}

func (o *object) object(key string) *object {
	v := o.raw(key)
	if v == nil {
		return nil
	}
	sub, err := parseObject(v)
	if err != nil {
		o.failf("%s is %s; it must be an object or null", key, shorten(v))
		return nil
	}
	return sub
}

// actNames are transformers' names (ACT2FN) of the supported activations.
var actNames = map[graph.ActKind]string{graph.ActGELUTanh: "gelu_new", graph.ActGELU: "gelu", graph.ActReLU: "relu", graph.ActSiLU: "silu"}

func (o *object) activation(key, def string) graph.ActKind {
	switch name := o.string(key, def); name {
	case "gelu_new", "gelu_pytorch_tanh":
		return graph.ActGELUTanh
	case "gelu", "gelu_python":
		return graph.ActGELU
	case "relu":
		return graph.ActReLU
	case "silu", "swish":
		return graph.ActSiLU
	default:
		o.failf("%s is %q, which is not built; it must be gelu_new, gelu_pytorch_tanh, gelu, relu or silu", key, name)
		return ""
	}
}

// shorten limits the length of a value in an error.
func shorten(v []byte) string {
	if len(v) > 60 {
		return string(bytes.ToValidUTF8(v[:57], nil)) + "..."
	}
	return string(v)
}
