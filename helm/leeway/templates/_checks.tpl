{{/* Values that would install something that cannot work are refused, in words that say what would.
Included once, by configmap.yaml. */}}
{{- define "leeway.checks" -}}
{{- $v := .Values -}}
{{- $known := .Capabilities.APIVersions -}}
{{- if and $v.serve.enabled $v.crdCheck (not ($known.Has "ray.io/v1/RayService")) -}}
{{- fail "this cluster has no RayService (ray.io/v1), so engines and rollout workers cannot run: install the KubeRay operator first, or set serve.enabled=false; `helm template` sees no cluster, tell it with --api-versions ray.io/v1/RayService" -}}
{{- end -}}
{{- if and $v.crdCheck $v.metrics.serviceMonitor.enabled (not ($known.Has "monitoring.coreos.com/v1/ServiceMonitor")) -}}
{{- fail "metrics.serviceMonitor.enabled needs the Prometheus operator (monitoring.coreos.com/v1), which this cluster has not: install it, or set it to false; for `helm template` add --api-versions monitoring.coreos.com/v1/ServiceMonitor" -}}
{{- end -}}
{{- if and $v.crdCheck $v.metrics.prometheusRule.enabled (not ($known.Has "monitoring.coreos.com/v1/PrometheusRule")) -}}
{{- fail "metrics.prometheusRule.enabled needs the Prometheus operator (monitoring.coreos.com/v1), which this cluster has not: install it, or set it to false; for `helm template` add --api-versions monitoring.coreos.com/v1/PrometheusRule" -}}
{{- end -}}
{{- if and $v.redis.enabled $v.redis.url -}}
{{- fail "redis.url names an outside Redis while redis.enabled starts one: set redis.enabled=false to use the outside one, or clear redis.url" -}}
{{- end -}}
{{- if not (or $v.redis.enabled $v.redis.url $v.redis.existingSecret) -}}
{{- fail "redis.enabled=false needs an outside Redis: set redis.url, or redis.existingSecret to a Secret that holds its URL under redis.secretKeys.url" -}}
{{- end -}}
{{- with $v.serve.gcsFaultTolerance -}}
{{- if and $v.serve.enabled .enabled (not $v.redis.enabled) (not .redisAddress) -}}
{{- fail "with an outside Redis Ray needs its address too: set serve.gcsFaultTolerance.redisAddress=HOST:PORT, or serve.gcsFaultTolerance.enabled=false to lose the Ray cluster with its head" -}}
{{- end -}}
{{- end -}}
{{- with $v.serve.gcsFaultTolerance -}}
{{- if and $v.serve.enabled .enabled $v.redis.enabled (or .redisAddress .username .existingSecret .passwordKey) -}}
{{- fail "serve.gcsFaultTolerance.redisAddress, username, existingSecret and passwordKey are of an outside Redis, while redis.enabled starts one, which Ray uses too: clear them, or set redis.enabled=false" -}}
{{- end -}}
{{- end -}}
{{- $isShared := or $v.storage.runs.existingClaim (has "ReadWriteMany" $v.storage.runs.accessModes) -}}
{{- if and $v.learner.enabled (gt (int $v.learner.replicas) 1) (not $isShared) -}}
{{- fail "every learner pod reads the checkpoints, so learner.replicas above 1 needs one volume for all: set storage.runs.accessModes={ReadWriteMany}, or storage.runs.existingClaim to such a claim" -}}
{{- end -}}
{{- if and $v.serve.enabled $v.serve.mountRuns (not $isShared) -}}
{{- fail "serve.mountRuns puts the run directory into pods on several nodes: set storage.runs.accessModes={ReadWriteMany}, or storage.runs.existingClaim to such a claim" -}}
{{- end -}}
{{- if and $v.learner.enabled (gt (int $v.learner.replicas) 1) (not (or $v.storage.runs.enabled $v.storage.runs.existingClaim)) -}}
{{- fail "learner.replicas above 1 needs storage.runs: without a volume each pod would keep checkpoints of its own" -}}
{{- end -}}
{{- if and $v.api.podDisruptionBudget.enabled (ne (toString $v.api.podDisruptionBudget.minAvailable) "") (ne (toString $v.api.podDisruptionBudget.maxUnavailable) "") -}}
{{- fail "api.podDisruptionBudget takes minAvailable or maxUnavailable, not both: clear one with \"\"" -}}
{{- end -}}
{{- if and $v.api.podDisruptionBudget.enabled (eq (toString $v.api.podDisruptionBudget.minAvailable) "") (eq (toString $v.api.podDisruptionBudget.maxUnavailable) "") -}}
{{- fail "api.podDisruptionBudget needs minAvailable or maxUnavailable, or set api.podDisruptionBudget.enabled=false" -}}
{{- end -}}
{{- if and $v.api.autoscaling.enabled (gt (int $v.api.autoscaling.minReplicas) (int $v.api.autoscaling.maxReplicas)) -}}
{{- fail "api.autoscaling.minReplicas is above api.autoscaling.maxReplicas; lower it" -}}
{{- end -}}
{{- if and $v.api.ingress.enabled (not $v.api.enabled) -}}
{{- fail "api.ingress.enabled has no API to lead to: set api.enabled=true" -}}
{{- end -}}
{{- if and $v.api.ingress.enabled $v.networkPolicy.enabled (not $v.networkPolicy.apiFrom) -}}
{{- fail "the network policies would keep the ingress controller out: name its pods in networkPolicy.apiFrom, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: ingress-nginx}}}]" -}}
{{- end -}}
{{- if and $v.metrics.serviceMonitor.enabled $v.networkPolicy.enabled (not $v.networkPolicy.metricsFrom) -}}
{{- fail "the network policies would keep Prometheus out: name its pods in networkPolicy.metricsFrom, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" -}}
{{- end -}}
{{- if and $v.serve.enabled (not $v.existingConfigMap) -}}
{{- $gpus := get $v.serve.policy.actorOptions "num_gpus" | default 0 | float64 -}}
{{- $line := regexFind `(?m)^\s*(policy\.)?tensor_parallel_size\s*=\s*\d+` $v.config -}}
{{- $size := regexFind `\d+$` $line | default "1" | float64 -}}
{{- if and (gt $gpus 0.0) (ne $gpus $size) -}}
{{- fail (printf "an engine spreads over %v GPUs by policy.tensor_parallel_size in config, but asks Ray for %v: set serve.policy.actorOptions.num_gpus=%v" $size $gpus $size) -}}
{{- end -}}
{{- end -}}
{{- if and $v.sweep.enabled (not $v.sweep.config) -}}
{{- fail "sweep.enabled needs sweep.config, the TOML of the sweep" -}}
{{- end -}}
{{- range $group := list "policyWorkers" "actorWorkers" -}}
{{- $workers := get $v.serve $group -}}
{{- if or (gt (int $workers.minReplicas) (int $workers.replicas)) (gt (int $workers.replicas) (int $workers.maxReplicas)) -}}
{{- fail (printf "serve.%s needs minReplicas <= replicas <= maxReplicas" $group) -}}
{{- end -}}
{{- end -}}
{{- end -}}
