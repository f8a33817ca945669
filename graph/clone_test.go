package graph_test

import (
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// fill sets every exported field of a value: slices get two elements, pointers a target.
func fill(v reflect.Value, n *int) {
	*n++
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() { // the others say whose the program is
				fill(v.Field(i), n)
			}
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(v.Index(i), n)
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(v.Index(i), n)
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		if v.Type() == reflect.TypeFor[*graph.Operation]() {
			return
		}
		fill(v.Elem(), n)
	case reflect.Interface:
		v.Set(reflect.ValueOf(graph.ScaleAttr{Factor: float64(*n)}))
	case reflect.String:
		v.SetString(string(rune('a' + *n%26)))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Float64:
		v.SetFloat(float64(*n))
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(int64(*n % 100))
	case reflect.Uint8:
		v.SetUint(uint64(*n % 5))
	default:
		panic("a program has a field of kind " + v.Kind().String())
	}
}

// apart requires that two values share no memory that either could write.
func apart(t *testing.T, path string, v, w reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			apart(t, path+"."+v.Type().Field(i).Name, v.Field(i), w.Field(i))
		}
	case reflect.Array:
		for i := range v.Len() {
			apart(t, path+"[]", v.Index(i), w.Index(i))
		}
	case reflect.Slice:
		require.NotEqual(t, v.Pointer(), w.Pointer(), "%s is shared", path)
		require.False(t, v.Len() < v.Cap() && path != ".Buffers", "%s has room to grow into what lies behind it", path)
		for i := range v.Len() {
			apart(t, path+"[]", v.Index(i), w.Index(i))
		}
	case reflect.Pointer:
		if v.Type() == reflect.TypeFor[*graph.Operation]() {
			return // a value that nobody writes
		}
		require.NotEqual(t, v.Pointer(), w.Pointer(), "%s is shared", path)
		apart(t, path, v.Elem(), w.Elem())
	}
}

func TestCloneIsDeep(t *testing.T) {
	p := &graph.Program{}
	n := 0
	fill(reflect.ValueOf(p).Elem(), &n)
	q := p.Clone()
	q.Keep()
	require.Equal(t, p, q)
	apart(t, "", reflect.ValueOf(q).Elem(), reflect.ValueOf(p).Elem())
}

func TestCloneOfWhatWasGivenUp(t *testing.T) {
	shares := func(p *graph.Program) bool { return &p.Buffers[0] == &p.Clone().Buffers[0] }
	p := &graph.Program{Buffers: make([]graph.Buffer, 1)}
	p.Yield()
	require.False(t, shares(p), "no clone: others may have its parts")
	q := p.Clone()
	require.False(t, shares(q), "not given up")
	q.Yield()
	require.True(t, shares(q))
	q.TakeBack()
	require.False(t, shares(q), "taken back")
	q.Keep()
	q.Yield()
	require.False(t, shares(q), "kept for several")
}
