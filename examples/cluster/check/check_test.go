// Package check holds the manifests beside it against the types of the APIs that
// they are for. It is a module of its own, so that nobody who builds Spillway
// builds Kubernetes.
package check

import (
	"os"
	"slices"
	"testing"

	mpijob "github.com/kubeflow/mpi-operator/pkg/apis/kubeflow/v2beta1"
	mpivalidation "github.com/kubeflow/mpi-operator/pkg/apis/kubeflow/validation"
	"github.com/stretchr/testify/require"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	jobset "sigs.k8s.io/jobset/api/jobset/v1alpha2"
	"sigs.k8s.io/yaml"
)

// read decodes a manifest; a field that its type lacks is an error.
func read(t *testing.T, file string, into any) {
	text, err := os.ReadFile("../" + file)
	require.NoError(t, err)
	require.NoError(t, yaml.UnmarshalStrict(text, into))
}

func TestJobSet(t *testing.T) {
	var s jobset.JobSet
	read(t, "jobset.yaml", &s)
	require.Equal(t, jobset.GroupVersion.String(), s.APIVersion)
	require.Equal(t, "JobSet", s.Kind)
	require.Len(t, s.Spec.ReplicatedJobs, 1)
	require.Equal(t, []jobset.FailurePolicyRule{{Name: "aPersonHasToLook", Action: jobset.FailJobSet, OnJobFailureReasons: []string{batch.JobReasonPodFailurePolicy}}},
		s.Spec.FailurePolicy.Rules)
	job := s.Spec.ReplicatedJobs[0].Template.Spec
	pod := job.Template.Spec
	checkPod(t, pod)
	require.Equal(t, core.RestartPolicyNever, pod.RestartPolicy, "the API server refuses podFailurePolicy with another")
	require.Greater(t, *pod.TerminationGracePeriodSeconds, int64(30), "time to save after SIGTERM")

	// What becomes of an exit status: the first rule that matches counts.
	fate := map[int32]batch.PodFailurePolicyAction{}
	for _, r := range job.PodFailurePolicy.Rules {
		require.True(t, (r.OnExitCodes == nil) != (len(r.OnPodConditions) == 0), "a rule is of statuses or of conditions")
		for _, c := range r.OnPodConditions {
			require.Equal(t, core.PodConditionType("DisruptionTarget"), c.Type)
			require.Equal(t, core.ConditionTrue, c.Status)
			require.Equal(t, batch.PodFailurePolicyActionIgnore, r.Action)
		}
		if r.OnExitCodes == nil {
			continue
		}
		require.Equal(t, batch.PodFailurePolicyOnExitCodesOpIn, r.OnExitCodes.Operator)
		require.True(t, slices.IsSorted(r.OnExitCodes.Values))
		require.NotNil(t, r.OnExitCodes.ContainerName)
		require.Equal(t, pod.Containers[0].Name, *r.OnExitCodes.ContainerName)
		for _, v := range r.OnExitCodes.Values {
			if _, ok := fate[v]; !ok {
				fate[v] = r.Action
			}
		}
	}
	require.Equal(t, map[int32]batch.PodFailurePolicyAction{
		1: batch.PodFailurePolicyActionFailJob, 2: batch.PodFailurePolicyActionFailJob,
		3: batch.PodFailurePolicyActionCount, 130: batch.PodFailurePolicyActionIgnore,
	}, fate)
}

func TestMPIJob(t *testing.T) {
	var j mpijob.MPIJob
	read(t, "mpijob.yaml", &j)
	require.Equal(t, mpijob.SchemeGroupVersion.String(), j.APIVersion)
	require.Equal(t, mpijob.Kind, j.Kind)
	mpijob.SetDefaults_MPIJob(&j)
	require.Empty(t, mpivalidation.ValidateMPIJob(&j))
	launcher, worker := j.Spec.MPIReplicaSpecs[mpijob.MPIReplicaTypeLauncher], j.Spec.MPIReplicaSpecs[mpijob.MPIReplicaTypeWorker]
	for _, r := range []*mpijob.ReplicaSpec{launcher, worker} {
		checkPod(t, r.Template.Spec)
	}
	args := launcher.Template.Spec.Containers[0].Args
	require.Equal(t, "-np", args[0])
	require.Equal(t, "16", args[1])
	require.EqualValues(t, 16, *j.Spec.SlotsPerWorker**worker.Replicas, "a slot a rank")
}

// checkPod holds a pod to rules that types alone don't say: whatever is mounted is
// a volume, and the other way round.
func checkPod(t *testing.T, pod core.PodSpec) {
	require.Len(t, pod.Containers, 1)
	var mounted, volumes []string
	for _, m := range pod.Containers[0].VolumeMounts {
		mounted = append(mounted, m.Name)
	}
	for _, v := range pod.Volumes {
		volumes = append(volumes, v.Name)
		require.NotNil(t, v.PersistentVolumeClaim)
	}
	require.Equal(t, volumes, mounted)
}
