// Package check holds the manifests beside it against the types of the APIs that
// they are for. It is a module of its own, so that nobody who builds Spillway
// builds Kubernetes.
package check

import (
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
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

// flag returns the number of a flag among a command's arguments, "--name=n" or "--name n".
func flag(t *testing.T, args []string, name string) int {
	t.Helper()
	for i, a := range args {
		value, ok := strings.CutPrefix(a, "--"+name+"=")
		if a == "--"+name && i+1 < len(args) {
			value, ok = args[i+1], true
		}
		if ok {
			n, err := strconv.Atoi(value)
			require.NoError(t, err, a)
			return n
		}
	}
	require.Fail(t, "no --"+name, "%v", args)
	return 0
}

// A job that comes back over other ranks keeps its bits: every size that it can have
// divides the micro-batches of its step.
func TestEverySizeDividesTheStep(t *testing.T) {
	divides := func(args []string, ranks ...int) {
		t.Helper()
		require.Contains(t, args, "--reproducible")
		require.Contains(t, args, "--resume")
		leaves := flag(t, args, "global-batch") / flag(t, args, "batch")
		for _, n := range ranks {
			require.Zero(t, leaves%n, "%d micro-batches over %d ranks", leaves, n)
		}
	}
	var s jobset.JobSet
	read(t, "jobset.yaml", &s)
	args := s.Spec.ReplicatedJobs[0].Template.Spec.Template.Spec.Containers[0].Args
	divides(args, flag(t, args, "ranks"), flag(t, args, "min-ranks"))
	require.Positive(t, flag(t, args, "restarts"))

	var j mpijob.MPIJob
	read(t, "mpijob.yaml", &j)
	args = j.Spec.MPIReplicaSpecs[mpijob.MPIReplicaTypeLauncher].Template.Spec.Containers[0].Args
	divides(args, 16, 12, 8, 4)

	text, err := os.ReadFile("../slurm.sh")
	require.NoError(t, err)
	hosts := regexp.MustCompile(`(?m)^#SBATCH --nodes=(\d+)-(\d+)$`).FindSubmatch(text)
	each := regexp.MustCompile(`(?m)^#SBATCH --ntasks-per-node=(\d+)$`).FindSubmatch(text)
	require.Len(t, hosts, 3)
	require.Len(t, each, 2)
	number := func(b []byte) int { n, err := strconv.Atoi(string(b)); require.NoError(t, err); return n }
	for n := number(hosts[1]); n <= number(hosts[2]); n++ {
		divides(strings.Fields(string(text)), n*number(each[1]))
	}
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
