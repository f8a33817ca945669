package tfevents

import (
	"encoding/binary"
	"encoding/hex"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
)

// eventType describes the fields of tensorflow.Event that scalars need, for protobuf's own decoder.
func eventType(t *testing.T) protoreflect.MessageDescriptor {
	field := func(name string, number int32, kind descriptorpb.FieldDescriptorProto_Type, repeated bool, of string) *descriptorpb.FieldDescriptorProto {
		label := descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL
		if repeated {
			label = descriptorpb.FieldDescriptorProto_LABEL_REPEATED
		}
		f := &descriptorpb.FieldDescriptorProto{Name: proto.String(name), Number: proto.Int32(number), Type: kind.Enum(), Label: label.Enum()}
		if of != "" {
			f.TypeName = proto.String(".tensorflow." + of)
		}
		return f
	}
	const (
		message = descriptorpb.FieldDescriptorProto_TYPE_MESSAGE
		text    = descriptorpb.FieldDescriptorProto_TYPE_STRING
		i64     = descriptorpb.FieldDescriptorProto_TYPE_INT64
		i32     = descriptorpb.FieldDescriptorProto_TYPE_INT32
		f64     = descriptorpb.FieldDescriptorProto_TYPE_DOUBLE
		f32     = descriptorpb.FieldDescriptorProto_TYPE_FLOAT
	)
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: proto.String("event.proto"), Package: proto.String("tensorflow"), Syntax: proto.String("proto3"),
		MessageType: []*descriptorpb.DescriptorProto{
			{Name: proto.String("Event"), Field: []*descriptorpb.FieldDescriptorProto{
				field("wall_time", 1, f64, false, ""), field("step", 2, i64, false, ""), field("file_version", 3, text, false, ""),
				field("summary", 5, message, false, "Summary"), field("session_log", 7, message, false, "SessionLog")}},
			{Name: proto.String("Summary"), Field: []*descriptorpb.FieldDescriptorProto{field("value", 1, message, true, "Value")}},
			{Name: proto.String("Value"), Field: []*descriptorpb.FieldDescriptorProto{field("tag", 1, text, false, ""), field("simple_value", 2, f32, false, "")}},
			{Name: proto.String("SessionLog"), Field: []*descriptorpb.FieldDescriptorProto{field("status", 1, i32, false, "")}},
		}}, nil)
	require.NoError(t, err)
	return file.Messages().ByName("Event")
}

// records splits a file into records and checks lengths and checksums by the format's definition.
func records(t *testing.T, file []byte) (list [][]byte) {
	sum := func(b []byte) uint32 {
		c := uint64(crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
		return uint32((c>>15|c<<17)&0xffffffff + 0xa282ead8)
	}
	for len(file) > 0 {
		n := binary.LittleEndian.Uint64(file)
		require.Equal(t, sum(file[:8]), binary.LittleEndian.Uint32(file[8:]))
		data := file[12 : 12+n]
		require.Equal(t, sum(data), binary.LittleEndian.Uint32(file[12+n:]))
		list, file = append(list, data), file[12+n+4:]
	}
	return list
}

func TestAnEventFileIsReadBack(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	w, err := Create(dir, 6)
	require.NoError(t, err)
	require.NoError(t, w.Scalars(7, Scalar{"train/loss", 2.5}, Scalar{"train/lr", 1e-3}))
	require.NoError(t, w.Scalars(8, Scalar{"train/loss", math.NaN()}))
	require.NoError(t, w.Close())
	again, err := Create(dir, -1)
	require.NoError(t, err, "a second run has a file of its own")
	require.NoError(t, again.Close())
	files, err := filepath.Glob(filepath.Join(dir, "events.out.tfevents.*"))
	require.NoError(t, err)
	require.Len(t, files, 2)
	text, err := os.ReadFile(w.f.Name())
	require.NoError(t, err)

	event := eventType(t)
	var got []protoreflect.Message
	for _, r := range records(t, text) {
		m := dynamicpb.NewMessage(event)
		require.NoError(t, proto.UnmarshalOptions{DiscardUnknown: false}.Unmarshal(r, m))
		require.Empty(t, m.GetUnknown())
		wall := m.Get(event.Fields().ByName("wall_time")).Float()
		require.InDelta(t, float64(time.Now().Unix()), wall, 600)
		got = append(got, m)
	}
	require.Len(t, got, 4)
	get := func(m protoreflect.Message, name protoreflect.Name) protoreflect.Value {
		return m.Get(m.Descriptor().Fields().ByName(name))
	}
	require.Equal(t, "brain.Event:2", get(got[0], "file_version").String())
	require.EqualValues(t, 7, get(got[1], "step").Int(), "TensorBoard drops steps from here on")
	require.EqualValues(t, 1, get(get(got[1], "session_log").Message(), "status").Int(), "START")
	values := get(get(got[2], "summary").Message(), "value").List()
	require.Equal(t, 2, values.Len())
	require.Equal(t, "train/lr", get(values.Get(1).Message(), "tag").String())
	require.Equal(t, float64(float32(1e-3)), get(values.Get(1).Message(), "simple_value").Float())
	require.EqualValues(t, 8, get(got[3], "step").Int())
	last := get(get(got[3], "summary").Message(), "value").List().Get(0).Message()
	require.True(t, math.IsNaN(get(last, "simple_value").Float()))
}

// Every event file that TensorFlow writes begins with these bytes: the length 24, its masked
// checksum, and, after the time, the version.
func TestTheFirstRecordIsTensorFlows(t *testing.T) {
	w, err := Create(t.TempDir(), -1)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	text, err := os.ReadFile(w.f.Name())
	require.NoError(t, err)
	require.Len(t, text, 12+24+4)
	require.Equal(t, "1800000000000000a37f4b2209", hex.EncodeToString(text[:13]))
	require.Equal(t, "\x1a\x0dbrain.Event:2", string(text[21:36]))
}
